"""A Hugging Face model directory becomes a draft: the decoder's tensors in execution order, checked one by one."""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np

from nearline.checkpoint_store.convert_files import CONFIG_NAME, gather_files, special_token_ids
from nearline.checkpoint_store.convert_types import Draft, DraftTensor, Reporter
from nearline.checkpoint_store.safetensors_file import StoredTensor
from nearline.checkpoint_store.safetensors_shards import open_weights
from nearline.checkpoint_store.source_directory import SourceDirectory
from nearline.protocol import (
    LAYOUTS,
    CheckpointInfo,
    CheckpointKind,
    DecoderSpec,
    Digest,
    TensorSlot,
    decoder_spec,
    tensor_slots,
)
from nearline.protocol.errors import CheckpointCorrupt, UnsupportedCheckpoint

DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_HEAD = "lm_head.weight"
_HEADS = {_HEAD, "embed_out.weight"}
_TABLES = ("embedding", "positions", "head")
"""Roles whose rows may well be zero: tokens and positions that nobody has trained."""
_TAIL_BYTES = 4096

Stored = Mapping[str, StoredTensor]


def draft_model(directory: SourceDirectory, source: str, reporter: Reporter) -> Draft:
    """Describe a model directory as a checkpoint to publish.

    Raises UnsupportedCheckpoint for what we do not run, CheckpointCorrupt for missing, torn or misshapen tensors.
    """
    config = _config(directory)
    stored: Stored = open_weights(directory, reporter)
    spec = read_spec(config)
    if spec.num_layers > len(stored):
        raise CheckpointCorrupt(f"{directory.path}: {len(stored)} tensors cannot make {spec.num_layers} layers")
    stored = _settle_names(stored, spec)
    stored, config = _settle_head(stored, config, spec)
    config = _settle_dtype(stored, config, spec)
    spec = read_spec(config)
    slots = tensor_slots(spec) or _stored_slots(stored, config, directory)
    tensors = tuple(_draft_tensor(slot, spec, stored, directory) for slot in slots)
    _warn_of_extras(stored, {tensor.name for tensor in tensors}, reporter)
    files = gather_files(directory, config)
    return Draft(tensors, files, model_info(spec, files, source))


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Describe the decoder of a config. Raises UnsupportedCheckpoint also for values of the wrong type."""
    try:
        spec = decoder_spec(config)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise UnsupportedCheckpoint(f"{CONFIG_NAME} holds a value we cannot use: {error}") from None
    if spec.dtype not in DTYPE_BYTES:
        raise UnsupportedCheckpoint(f"dtype {spec.dtype!r} is not supported; supported: {', '.join(DTYPE_BYTES)}")
    return spec


def model_info(spec: DecoderSpec, files: Mapping[str, bytes], source: str) -> CheckpointInfo:
    """Tell the fleet what it needs to know of a model; digest, size and files come with publishing."""
    eos_token_ids, bos_token_id = special_token_ids(files, spec.vocab_size)
    return CheckpointInfo(
        digest=Digest(""),
        kind=CheckpointKind.MODEL,
        num_bytes=0,
        family=spec.family,
        architecture=spec.architecture,
        source=source,
        dtype=spec.dtype,
        files=(),
        max_context_tokens=spec.max_context_tokens,
        vocab_size=spec.vocab_size,
        kv_bytes_per_token=spec.kv_values_per_token * DTYPE_BYTES[spec.dtype],
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
    )


def _config(directory: SourceDirectory) -> dict[str, Any]:
    config = directory.json(CONFIG_NAME)
    if config is not None:
        return config
    if directory.file("adapter_config.json") is not None:
        raise UnsupportedCheckpoint(f"{directory.path} is a LoRA adapter, not a model; add it as an adapter")
    raise UnsupportedCheckpoint(f"{directory.path}: no {CONFIG_NAME}; is this a model directory?")


def _stored_slots(stored: Stored, config: Mapping[str, Any], directory: SourceDirectory) -> list[TensorSlot]:
    """List what a checkpoint of no described family holds, in the order in which its layers run.

    Names and shapes are checked when an engine binds it: only transformers knows what they must be. Buffers of
    integers (masks, positions) are made anew there.
    """
    if config.get("tie_word_embeddings") is False and not stored.keys() & _HEADS:
        raise CheckpointCorrupt(
            f"{directory.path}: no output layer ({', '.join(sorted(_HEADS))}), although config.json says it is not "
            "tied to the embeddings; fetch the model again"
        )
    names = [name for name, tensor in stored.items() if tensor.entry.dtype in DTYPE_NAMES]
    return [TensorSlot(name, stored[name].entry.shape, _guessed_role(name)) for name in sorted(names, key=_turn)]


def _guessed_role(name: str) -> str:
    return "head" if name in _HEADS else "embedding" if "embed" in name else "other"


def _turn(name: str) -> tuple[int, int]:
    """When a tensor runs: embeddings, then the layers by their numbers, then the rest."""
    numbers = [int(piece) for piece in name.split(".") if piece.isdigit()]
    if numbers:
        return 1, numbers[0]
    return (0, 0) if "embed" in name and name not in _HEADS else (2, 0)


def _embedding(spec: DecoderSpec) -> str:
    return LAYOUTS[spec.layout].embedding + ".weight"


def _settle_names(stored: Stored, spec: DecoderSpec) -> Stored:
    """Give tensors their whole names: a model saved without its output layer lacks the first word of each (GPT-2)."""
    prefix, _, bare = _embedding(spec).partition(".")
    if spec.layout == "generic" or _embedding(spec) in stored or bare not in stored:
        return stored
    return {name if name == _HEAD else f"{prefix}.{name}": tensor for name, tensor in stored.items()}


def _settle_head(stored: Stored, config: dict[str, Any], spec: DecoderSpec) -> tuple[Stored, dict[str, Any]]:
    """Decide whether the output layer is its own: a tied one may be absent, there twice, or under either name."""
    name = _embedding(spec)
    head, embedding = stored.get(_HEAD), stored.get(name)
    if not spec.is_tied or head is None or spec.layout == "generic":
        return stored, config
    if embedding is None:
        return {**stored, name: head}, config
    if _is_equal(head, embedding):
        return {other: tensor for other, tensor in stored.items() if other != _HEAD}, config
    return stored, {**config, "tie_word_embeddings": False}


def _settle_dtype(stored: Stored, config: dict[str, Any], spec: DecoderSpec) -> dict[str, Any]:
    """A config without a dtype means the weights' own, as in transformers."""
    name = min(stored, key=_turn) if spec.layout == "generic" and stored else _embedding(spec)
    if config.get("dtype") or config.get("torch_dtype") or name not in stored:
        return config
    dtype = stored[name].entry.dtype
    return {**config, "dtype": DTYPE_NAMES.get(dtype, dtype)}


def _is_equal(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.entry.dtype, a.entry.shape) != (b.entry.dtype, b.entry.shape):
        return False
    return all(left == right for left, right in zip_longest(a.blocks(), b.blocks()))


def _draft_tensor(slot: TensorSlot, spec: DecoderSpec, stored: Stored, directory: SourceDirectory) -> DraftTensor:
    tensor = stored.get(slot.name)
    if tensor is None:
        hint = " (config.json says the output layer is not tied to the embeddings)" if slot.name == _HEAD else ""
        raise CheckpointCorrupt(f"{directory.path}: tensor {slot.name!r} is missing{hint}; fetch the model again")
    entry = tensor.entry
    if entry.shape != slot.shape:
        raise CheckpointCorrupt(
            f"{tensor.path}: tensor {entry.name!r} has shape {entry.shape}, config.json asks for {slot.shape}"
        )
    if entry.dtype not in DTYPE_NAMES:
        raise UnsupportedCheckpoint(
            f"{tensor.path}: tensor {entry.name!r} is {entry.dtype}; supported: {', '.join(DTYPE_NAMES)}. "
            "Use the original, unquantised model"
        )
    may_be_zero = spec.norm_offset != 0 and slot.role.endswith("norm.weight")
    if may_be_zero:
        return DraftTensor(slot.name, entry.dtype, entry.shape, entry.num_bytes, tensor.blocks)
    return DraftTensor(slot.name, entry.dtype, entry.shape, entry.num_bytes, lambda: _checked(tensor, slot.role))


def _checked(tensor: StoredTensor, role: str) -> Iterator[memoryview]:
    """Pass the bytes of a weight on, and refuse one that nothing was ever written to.

    An interrupted download into a preallocated file reads as zeros: whole tensors, or the end of the last one.
    """
    entry = tensor.entry
    is_weight = entry.num_bytes > 0 and entry.name.endswith(".weight")
    is_matrix = is_weight and len(entry.shape) > 1 and role not in _TABLES
    is_zero, tail = is_weight, b""
    for block in tensor.blocks():
        is_zero = is_zero and not np.frombuffer(block, np.uint8).any()
        tail = bytes(block[-_TAIL_BYTES:])
        yield block
    if is_zero:
        raise CheckpointCorrupt(
            f"{tensor.path}: tensor {entry.name!r} is all zeros ({entry.num_bytes} bytes); the file was never written "
            "whole, fetch it again"
        )
    if is_matrix and tensor.is_last and len(tail) == _TAIL_BYTES and not any(tail):
        raise CheckpointCorrupt(
            f"{tensor.path}: the file ends in {_TAIL_BYTES} zero bytes inside tensor {entry.name!r}; fetch it again"
        )


def _warn_of_extras(stored: Stored, used: set[str], reporter: Reporter) -> None:
    extras = sorted(name for name in stored if name not in used)
    if extras:
        more = f" and {len(extras) - 10} more" if len(extras) > 10 else ""
        reporter.warn(f"tensors that the decoder does not use were left out: {', '.join(extras[:10])}{more}")

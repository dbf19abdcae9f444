"""A PEFT LoRA directory becomes a draft: A and B of every served module, checked against the base they are for."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nearline.checkpoint_store.adapter_config import read_settings
from nearline.checkpoint_store.convert_files import CONFIG_NAME, to_json
from nearline.checkpoint_store.convert_model import DTYPE_NAMES, read_spec
from nearline.checkpoint_store.convert_types import Draft, DraftTensor, Reporter
from nearline.checkpoint_store.publish import CHECKPOINTS
from nearline.checkpoint_store.safetensors_file import StoredTensor, open_safetensors
from nearline.checkpoint_store.source_directory import SourceDirectory
from nearline.checkpoint_store.types import Manifest, read_manifest
from nearline.protocol import LAYOUTS, CheckpointInfo, CheckpointKind, DecoderSpec, Digest, tensor_slots
from nearline.protocol.errors import AdapterMismatch, CheckpointCorrupt, NotFound, UnsupportedCheckpoint

ADAPTER_NAME, ADAPTER_CONFIG_NAME = "adapter.json", "adapter_config.json"
ADAPTER_WEIGHTS_NAME, ADAPTER_PICKLE_NAME = "adapter_model.safetensors", "adapter_model.bin"
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?:model\.)?(?P<path>layers\.(?P<layer>\d+)\."
    r"(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj))\.lora_(?P<side>[AB])(?:\.\w+)?\.weight"
)
_EXPONENTS: dict[str, tuple[Any, int]] = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
}
"""Integer view of each dtype and its exponent bits: all ones means NaN or infinity."""


@dataclass(slots=True)
class _Module:
    """One target of the adapter. `peft_name` is what peft's patterns are matched against."""

    peft_name: str
    layer: int
    sides: dict[str, StoredTensor]


def draft_adapter(
    directory: SourceDirectory, source: str, root: Path, base_digest: Digest, reporter: Reporter
) -> Draft:
    """Describe a PEFT directory as a checkpoint to publish, for one base model in the same store.

    Raises UnsupportedCheckpoint for features we do not serve, AdapterMismatch when it does not fit the base,
    CheckpointCorrupt for torn or non-finite weights, NotFound for an unknown base.
    """
    base, spec = _base(root, base_digest)
    if not LAYOUTS[spec.layout].takes_adapters:
        raise UnsupportedCheckpoint(
            f"adapters of {spec.architecture} models are not served, their projections are not the seven of Llama; "
            "merge it and add the result as a model: peft's merge_and_unload(), then save_pretrained(NEW_DIR)"
        )
    settings = read_settings(_config(directory), reporter)
    modules = _modules(_weights(directory), directory)
    shapes = {slot.name.removesuffix(".weight"): slot.shape for slot in tensor_slots(spec)}
    tensors, described = [], {}
    for name in (name for name in shapes if name in modules):
        module = modules.pop(name)
        rank = _check_shapes(name, module.sides, shapes[name], settings.rank(module.peft_name))
        described[name] = {"rank": rank, "scaling": settings.scaling(module.peft_name)}
        tensors += [_draft_tensor(f"{name}.lora_{side}", module.sides[side]) for side in "AB"]
    if modules:
        name, module = min(modules.items(), key=lambda item: (-item[1].layer, item[0]))
        raise AdapterMismatch(
            f"{directory.path}: the adapter changes {name!r}, but the base {base.source} has layers 0 to "
            f"{spec.num_layers - 1}; was it trained on another model?"
        )
    ranks = [int(entry["rank"]) for entry in described.values()]
    files = _files(directory, {"rank": max(ranks), "modules": described})
    dtype = DTYPE_NAMES[tensors[0].dtype]
    info = CheckpointInfo(
        digest=Digest(""), kind=CheckpointKind.ADAPTER, num_bytes=0, family=spec.family,
        architecture=spec.architecture, source=source, dtype=dtype, files=(),
        base_digest=base_digest, rank=max(ranks),
    )  # fmt: skip
    return Draft(tuple(tensors), files, info)


def _base(root: Path, base_digest: Digest) -> tuple[CheckpointInfo, DecoderSpec]:
    path = root / CHECKPOINTS / base_digest
    if not re.fullmatch(r"[0-9a-f]{32}", base_digest) or not path.is_dir():
        raise NotFound(f"base checkpoint {base_digest!r} is not in {root}; import the base model first", param="base")
    manifest: Manifest = read_manifest(path)
    if manifest.info.kind is not CheckpointKind.MODEL:
        raise AdapterMismatch(f"the base {base_digest} is an adapter itself; name a model", param="base")
    config = SourceDirectory(path).json(CONFIG_NAME)
    return manifest.info, read_spec(config or {})


def _config(directory: SourceDirectory) -> dict[str, Any]:
    config = directory.json(ADAPTER_CONFIG_NAME)
    if config is None:
        is_model = directory.file(CONFIG_NAME) is not None
        hint = "it looks like a model; add it as a model" if is_model else "is this a PEFT adapter directory?"
        raise UnsupportedCheckpoint(f"{directory.path}: no {ADAPTER_CONFIG_NAME}; {hint}")
    return config


def _weights(directory: SourceDirectory) -> dict[str, StoredTensor]:
    path = directory.file(ADAPTER_WEIGHTS_NAME)
    if path is not None:
        return open_safetensors(path)
    if directory.file(ADAPTER_PICKLE_NAME) is not None:
        raise UnsupportedCheckpoint(
            f"{directory.path}: only {ADAPTER_PICKLE_NAME}, a pickle, which can run code and is never opened; load the "
            "adapter with peft and save_pretrained(NEW_DIR) to get safetensors"
        )
    raise UnsupportedCheckpoint(f"{directory.path}: no {ADAPTER_WEIGHTS_NAME}; fetch the whole adapter again")


def _modules(weights: Mapping[str, StoredTensor], directory: SourceDirectory) -> dict[str, _Module]:
    modules: dict[str, _Module] = {}
    for key, tensor in weights.items():
        match = _TENSOR.fullmatch(key)
        if match is None:
            raise UnsupportedCheckpoint(
                f"{tensor.path}: tensor {key!r} is not LoRA on q, k, v, o, gate, up or down projections, which is what "
                "is served; train the adapter on those modules"
            )
        name = f"model.{match['path']}"
        module = modules.setdefault(name, _Module(match["module"], int(match["layer"]), {}))
        if match["side"] in module.sides:
            raise CheckpointCorrupt(f"{tensor.path}: lora_{match['side']} of {name!r} is there twice ({key!r})")
        module.sides[match["side"]] = tensor
    if not modules:
        raise AdapterMismatch(f"{directory.path}: the adapter changes no module at all; its weights file is empty")
    return modules


def _check_shapes(name: str, sides: Mapping[str, StoredTensor], base: tuple[int, ...], expected_rank: int) -> int:
    for side, other in ("AB", "BA"):
        if side not in sides:
            path = sides[other].path
            raise AdapterMismatch(f"{path}: {name!r} has lora_{other} but no lora_{side}; save the adapter again")
    a, b = sides["A"].entry, sides["B"].entry
    rank = a.shape[0] if a.shape else 0
    if a.shape != (rank, base[1]) or b.shape != (base[0], rank) or rank == 0:
        raise AdapterMismatch(
            f"{sides['A'].path}: {name!r} has A {a.shape} and B {b.shape}; the base's weight is {base}, which needs "
            f"A (r, {base[1]}) and B ({base[0]}, r); was it trained on another model?"
        )
    if rank != expected_rank:
        raise AdapterMismatch(
            f"{sides['A'].path}: {name!r} has rank {rank}, {ADAPTER_CONFIG_NAME} says {expected_rank}; which scaling "
            "is meant cannot be known"
        )
    for entry in (a, b):
        if entry.dtype not in _EXPONENTS:
            where = f"{sides['A'].path}: {entry.name!r}"
            raise UnsupportedCheckpoint(f"{where} is {entry.dtype}; save it as F32, F16 or BF16")
    return rank


def _draft_tensor(name: str, tensor: StoredTensor) -> DraftTensor:
    entry = tensor.entry
    return DraftTensor(name, entry.dtype, entry.shape, entry.num_bytes, lambda: _finite(tensor))


def _finite(tensor: StoredTensor) -> Iterator[memoryview]:
    view, exponent = _EXPONENTS[tensor.entry.dtype]
    for block in tensor.blocks():
        if (np.frombuffer(block, view) & view(exponent) == exponent).any():
            raise CheckpointCorrupt(
                f"{tensor.path}: tensor {tensor.entry.name!r} holds NaN or infinity; the training diverged or "
                "the file is damaged"
            )
        yield block


def _files(directory: SourceDirectory, description: Mapping[str, Any]) -> dict[str, bytes]:
    files = {ADAPTER_NAME: to_json(description)}
    for name in (ADAPTER_CONFIG_NAME, "chat_template.jinja"):
        content = directory.read(name)
        if content is not None:
            files[name] = content
    return files

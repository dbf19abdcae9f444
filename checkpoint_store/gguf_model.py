"""A GGUF file becomes a draft: dequantised to bfloat16, un-permuted, named as transformers names it.

All tensors become bfloat16, norms too, as transformers does when told `dtype=bfloat16`: a GGUF's float32 norms are
themselves widened from the bfloat16 of the original model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from nearline.checkpoint_store.convert_files import (
    CONFIG_NAME,
    GENERATION_NAME,
    to_json,
)
from nearline.checkpoint_store.convert_model import model_info, read_spec
from nearline.checkpoint_store.convert_types import Draft, DraftTensor, Reporter
from nearline.checkpoint_store.gguf_config import generation_config, gguf_config, gguf_family
from nearline.checkpoint_store.gguf_file import GgufFile, GgufTensor, read_gguf
from nearline.checkpoint_store.gguf_tokenizer import tokenizer_files
from nearline.checkpoint_store.numbers import to_bfloat16
from nearline.checkpoint_store.safetensors_file import read_blocks
from nearline.protocol import Bytes, TensorSlot, tensor_slots
from nearline.protocol.errors import CheckpointCorrupt, UnsupportedCheckpoint

_BLOCK_VALUES = 4 * 1024 * 1024
"""Values dequantised at once: 16 MiB of float32."""
_EMBEDDING, _OUTPUT, _ROPE = "token_embd.weight", "output.weight", "rope_freqs.weight"
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Weight:
    """One tensor to dequantise; `head_dim` is set where rows are interleaved within each head."""

    path: Path
    tensor: GgufTensor
    head_dim: int | None

    def blocks(self) -> Iterator[bytes]:
        """Yield the tensor as bfloat16, some rows at a time."""
        is_zero = len(self.tensor.shape) > 1
        for values in self._rows():
            if not np.isfinite(values).all():
                raise CheckpointCorrupt(
                    f"{self.path}: tensor {self.tensor.name!r} holds NaN or infinity; fetch the file again"
                )
            is_zero = is_zero and not values.any()
            yield to_bfloat16(values).tobytes()
        if is_zero:
            raise CheckpointCorrupt(
                f"{self.path}: tensor {self.tensor.name!r} is all zeros, never written; fetch the file again"
            )

    def _rows(self) -> Iterator[NDArray[np.float32]]:
        tensor = self.tensor
        # One-dimensional tensors are never quantised: a column of single values permutes like a matrix.
        num_rows = tensor.shape[0]
        columns = tensor.shape[1] if len(tensor.shape) > 1 else 1
        row_bytes = tensor.num_bytes // max(num_rows, 1)
        step = max(_BLOCK_VALUES // columns, 1)
        if self.head_dim:
            step = max(step // self.head_dim, 1) * self.head_dim
        for first in range(0, num_rows, step):
            rows = min(step, num_rows - first)
            raw = _read(self.path, tensor, first * row_bytes, rows * row_bytes)
            values: NDArray[np.float32] = dequantize(raw.reshape(rows, row_bytes), tensor.kind)
            yield _uninterleave(values, self.head_dim) if self.head_dim else values


def draft_gguf(path: Path, source: str, reporter: Reporter) -> Draft:
    """Describe a GGUF file as a checkpoint to publish.

    Raises UnsupportedCheckpoint for what we do not run, CheckpointCorrupt for missing, torn or misshapen tensors.
    """
    gguf = read_gguf(path)
    family = gguf_family(gguf.metadata)
    embedding = _tensor(gguf, _EMBEDDING)
    config = gguf_config(
        gguf.metadata,
        vocab_size=embedding.shape[0],
        is_tied=_OUTPUT not in gguf.tensors,
        has_attention_bias="blk.0.attn_q.bias" in gguf.tensors,
        rope_factors=_rope_factors(gguf),
    )
    spec = read_spec(config)
    if spec.num_layers > len(gguf.tensors):
        raise CheckpointCorrupt(f"{path}: {len(gguf.tensors)} tensors cannot make {spec.num_layers} layers")
    head_dim = spec.head_dim if family.is_permuted else None
    tensors = tuple(_draft_tensor(gguf, slot, head_dim) for slot in tensor_slots(spec))
    used = {gguf_name(tensor.name) for tensor in tensors} | {_ROPE}
    extras = sorted(gguf.tensors.keys() - used)
    if extras:
        reporter.warn(f"tensors that the decoder does not use were left out: {', '.join(extras[:10])}")
    files = {
        CONFIG_NAME: to_json(config),
        GENERATION_NAME: to_json(generation_config(gguf.metadata)),
        **tokenizer_files(gguf.metadata, spec.max_context_tokens),
    }
    return Draft(tensors, files, model_info(spec, files, source))


def gguf_name(name: str) -> str:
    """Translate transformers' tensor name into GGUF's."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.{suffix}"


def _uninterleave(values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Undo the row order that llama.cpp's converter gives q and k: pairs (2i, 2i+1) become halves (i, i + D/2)."""
    heads, columns = values.shape[0] // head_dim, values.shape[1]
    return values.reshape(heads, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(values.shape)


def _draft_tensor(gguf: GgufFile, slot: TensorSlot, head_dim: int | None) -> DraftTensor:
    tensor = _tensor(gguf, gguf_name(slot.name))
    if tensor.shape != slot.shape:
        raise CheckpointCorrupt(
            f"{gguf.path}: tensor {tensor.name!r} has shape {tensor.shape}, its metadata asks for {slot.shape}"
        )
    is_permuted = ".self_attn.q_proj." in slot.name or ".self_attn.k_proj." in slot.name
    weight = _Weight(gguf.path, tensor, head_dim if is_permuted else None)
    num_values = tensor.shape[0] * (tensor.shape[1] if len(tensor.shape) > 1 else 1)
    return DraftTensor(slot.name, "BF16", slot.shape, 2 * num_values, weight.blocks)


def _tensor(gguf: GgufFile, name: str) -> GgufTensor:
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise CheckpointCorrupt(f"{gguf.path}: tensor {name!r} is missing; fetch the file again")
    try:
        dequantize(np.zeros((1, tensor.num_bytes // max(tensor.shape[0], 1)), np.uint8), tensor.kind)
    except NotImplementedError:
        raise UnsupportedCheckpoint(f"{gguf.path}: {name!r} is {tensor.kind.name}, which `gguf` cannot read") from None
    return tensor


def _rope_factors(gguf: GgufFile) -> list[float] | None:
    tensor = gguf.tensors.get(_ROPE)
    if tensor is None:
        return None
    raw = _read(gguf.path, tensor, 0, tensor.num_bytes)
    factors: list[float] = dequantize(raw.reshape(1, -1), tensor.kind).ravel().tolist()
    return factors


def _read(path: Path, tensor: GgufTensor, start: Bytes, size: Bytes) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(read_blocks(path, tensor.offset + start, size, tensor.name)), np.uint8)

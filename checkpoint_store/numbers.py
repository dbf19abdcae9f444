"""Tensors of a file as float32 numbers, for the few sums an import needs."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from nearline.checkpoint_store.safetensors_file import StoredTensor
from nearline.protocol.errors import CheckpointCorrupt

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bits16 = np.ndarray[Any, np.dtype[np.uint16]]
DTYPES: dict[str, tuple[Any, int]] = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
}
"""Integer view of each dtype and its exponent bits: all ones means NaN or infinity."""


def finite_blocks(tensor: StoredTensor) -> Iterator[memoryview]:
    """Read a tensor in blocks. Raises CheckpointCorrupt at the first that holds NaN or infinity."""
    view, exponent = DTYPES[tensor.entry.dtype]
    for block in tensor.blocks():
        if (np.frombuffer(block, view) & view(exponent) == exponent).any():
            raise CheckpointCorrupt(
                f"{tensor.path}: tensor {tensor.entry.name!r} holds NaN or infinity; the training diverged or "
                "the file is damaged"
            )
        yield block


def to_bfloat16(values: Floats) -> Bits16:
    """Round float32 to the nearest bfloat16, ties to even, as bit patterns; the largest become infinite. No NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype("<u2")


def from_bfloat16(bits: Bits16) -> Floats:
    """Widen bit patterns of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def floats_of(raw: bytes | memoryview, dtype: str) -> Floats:
    """Widen the bytes of a dtype in DTYPES."""
    if dtype == "BF16":
        return from_bfloat16(np.frombuffer(raw, np.uint16))
    return np.frombuffer(raw, np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def read_float32(tensor: StoredTensor) -> Floats:
    """Read a whole tensor of a dtype in DTYPES. Raises CheckpointCorrupt where it is not finite."""
    raw = b"".join(bytes(block) for block in finite_blocks(tensor))
    return floats_of(raw, tensor.entry.dtype).reshape(tensor.entry.shape)


def to_dtype(values: Floats, dtype: str) -> bytes | None:
    """Round numbers to a dtype in DTYPES, to the nearest, ties to even. None if one becomes infinite."""
    if dtype == "F32":
        return values.astype("<f4").tobytes() if np.isfinite(values).all() else None
    if dtype == "F16":
        with np.errstate(over="ignore"):
            halves = values.astype("<f2")
        return halves.tobytes() if np.isfinite(halves).all() else None
    rounded = to_bfloat16(values)
    return None if (rounded & 0x7F80 == 0x7F80).any() else rounded.tobytes()

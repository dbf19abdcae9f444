"""The header of a safetensors file, read and written strictly. Pure.

Source: the format description at https://github.com/huggingface/safetensors: a u64 (little-endian) header length, a
JSON object, then the data, which the tensors cover exactly: no hole, no overlap, no byte left over.
"""

import json
from collections.abc import Sequence
from typing import Any

from nearline.checkpoint_store.types import DATA_ALIGNMENT, TensorEntry
from nearline.protocol import Bytes
from nearline.protocol.errors import CheckpointCorrupt

LENGTH_BYTES: Bytes = 8
MAX_HEADER_BYTES: Bytes = 100_000_000
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "C64": 64, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


def tensor_bytes(dtype: str, shape: Sequence[int]) -> Bytes:
    """Count the bytes of a tensor. Raises ValueError for an unknown dtype or a size that is no whole byte."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise ValueError(f"unknown dtype {dtype!r}")
    total_bits = bits
    for dim in shape:
        total_bits *= dim
        if total_bits >= 2**63:
            raise ValueError(f"shape {list(shape)[:8]} is beyond any file")
    if total_bits % 8:
        raise ValueError(f"{dtype} of shape {tuple(shape)} does not fill whole bytes")
    return total_bits // 8


def header_length(prefix: bytes, file_bytes: Bytes, label: str) -> Bytes:
    """Read the length of the JSON from a file's first 8 bytes. Raises CheckpointCorrupt naming the file and sizes."""
    if prefix.startswith(b"version "):
        raise CheckpointCorrupt(f"{label}: a Git LFS pointer, not the weights; run `git lfs pull` in the source")
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointCorrupt(f"{label}: {file_bytes} bytes, too short for a safetensors file; fetch it again")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointCorrupt(f"{label}: header of {length} bytes (at most {MAX_HEADER_BYTES}); not safetensors?")
    if LENGTH_BYTES + length > file_bytes:
        raise CheckpointCorrupt(
            f"{label}: truncated in its header: {file_bytes} bytes, the header alone needs {LENGTH_BYTES + length}; "
            "fetch the file again"
        )
    return length


def parse_header(raw: bytes, file_bytes: Bytes, label: str) -> dict[str, TensorEntry]:
    """Read the JSON header `raw` of a file of `file_bytes`; offsets in the result count from the file's start.

    Raises CheckpointCorrupt naming file, tensor, expected and actual sizes.
    """
    data_start = LENGTH_BYTES + len(raw)
    entries = [_entry(name, fields, data_start, label) for name, fields in _json_object(raw, label).items()]
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    _check_coverage(entries, data_start, file_bytes, label)
    return {entry.name: entry for entry in entries}


def build_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, tuple[TensorEntry, ...]]:
    """Lay out (name, dtype, shape) in the given order: the file's first bytes, and where each tensor lies.

    The JSON is padded with spaces so that data starts on a multiple of DATA_ALIGNMENT.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, sizes = 0, []
    for name, dtype, shape in tensors:
        if name in header:
            raise ValueError(f"tensor {name!r} is named twice")
        size = tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        sizes.append(size)
        position += size
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-(LENGTH_BYTES + len(raw)) % DATA_ALIGNMENT)
    offset, entries = LENGTH_BYTES + len(raw), []
    for (name, dtype, shape), size in zip(tensors, sizes, strict=True):
        entries.append(TensorEntry(name, dtype, tuple(shape), offset, size))
        offset += size
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw, tuple(entries)


def _json_object(raw: bytes, label: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name occurs twice")
        return result

    try:
        if not raw.startswith(b"{"):
            raise ValueError("it does not start with '{'")
        header: dict[str, Any] = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
        "".join(header).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{label}: the header is not valid JSON ({error}); fetch the file again") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise CheckpointCorrupt(f"{label}: __metadata__ in the safetensors header is not a map of strings")
    return header


def _entry(name: str, fields: Any, data_start: Bytes, label: str) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError):
        dtype, shape, numbers = None, None, []
    is_listed = isinstance(dtype, str) and isinstance(shape, list)
    if not is_listed or any(type(number) is not int or number < 0 for number in numbers):
        raise CheckpointCorrupt(
            f"{label}: tensor {name!r} is badly described; a dtype, a shape and two data_offsets in whole numbers "
            "are expected; fetch the file again"
        )
    try:
        size = tensor_bytes(dtype, shape)
    except ValueError as error:
        raise CheckpointCorrupt(f"{label}: tensor {name!r} is badly described: {error}") from None
    if end - begin != size:
        raise CheckpointCorrupt(
            f"{label}: tensor {name!r} ({dtype} {tuple(shape)}) needs {size} bytes, its offsets hold {end - begin}"
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + begin, size)


def _check_coverage(entries: list[TensorEntry], data_start: Bytes, file_bytes: Bytes, label: str) -> None:
    position = data_start
    for entry in entries:
        if entry.offset != position:
            fault = "overlaps the one before it" if entry.offset < position else "leaves a hole before it"
            raise CheckpointCorrupt(f"{label}: tensor {entry.name!r} {fault} (at {entry.offset}, expected {position})")
        position += entry.num_bytes
    for entry in entries:
        if entry.offset + entry.num_bytes > file_bytes:
            raise CheckpointCorrupt(
                f"{label}: truncated at tensor {entry.name!r}: it ends at byte {entry.offset + entry.num_bytes}, the "
                f"file has {file_bytes} of {position} bytes; fetch the file again"
            )
    if position != file_bytes:
        raise CheckpointCorrupt(f"{label}: {file_bytes} bytes, but its tensors end at {position}; fetch it again")

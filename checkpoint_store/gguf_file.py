"""A GGUF file: its metadata, and where its tensors lie. Strict: every length is checked against the file.

Source: the format description in ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from nearline.protocol import Bytes
from nearline.protocol.errors import CheckpointCorrupt, UnsupportedCheckpoint

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS, _MAX_DEPTH = 4, 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor, row-major: `shape[-1]` is GGUF's first dimension. `offset` counts from the file's start."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: Bytes
    num_bytes: Bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata values are ints, floats, bools, strings or lists of them."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the head of a GGUF file. Raises CheckpointCorrupt naming file, tensor and sizes if it is torn."""
    with path.open("rb", buffering=1024 * 1024) as file:
        reader = _Reader(file, path)
        if file.read(4) != b"GGUF":
            raise CheckpointCorrupt(f"{path}: not a GGUF file (its first bytes are not GGUF); fetch it again")
        version = reader.scalar("I")
        if version not in (2, 3):
            raise UnsupportedCheckpoint(f"{path}: GGUF version {version} (or big-endian); versions 2 and 3 are read")
        num_tensors, num_values = reader.scalar("Q"), reader.scalar("Q")
        metadata = dict(reader.pair() for _ in range(num_values))
        infos = [reader.tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointCorrupt(f"{path}: general.alignment is {alignment!r}")
        data_start = -(-file.tell() // alignment) * alignment
    tensors = [_place(info, data_start, reader.file_bytes, path) for info in infos]
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in tensors})


class _Reader:
    """Reads one value after another and never past the end."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self.file_bytes: Bytes = os.fstat(file.fileno()).st_size

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self._take(self.scalar("Q")).decode("utf-8", "replace")

    def pair(self) -> tuple[str, Any]:
        return self.string(), self._value(self.scalar("I"), 0)

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self.string(), self.scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise CheckpointCorrupt(f"{self._path}: tensor {name!r} has {num_dims} dimensions; fetch the file again")
        dims = tuple(self.scalar("Q") for _ in range(num_dims))
        return name, dims[::-1], self.scalar("I"), self.scalar("Q")

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise CheckpointCorrupt(f"{self._path}: metadata value of unknown type {kind}; fetch the file again")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item]).newbyteorder("<")
            return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        if count > self.file_bytes:
            raise self._torn(count)
        return [self._value(item, depth + 1) for _ in range(count)]

    def _take(self, size: Bytes) -> bytes:
        if size > self.file_bytes - self._file.tell():
            raise self._torn(size)
        data = self._file.read(size)
        if len(data) != size:
            raise self._torn(size)
        return data

    def _torn(self, size: Bytes) -> CheckpointCorrupt:
        return CheckpointCorrupt(
            f"{self._path}: truncated in its header: {size} bytes are expected at {self._file.tell()}, the file has "
            f"{self.file_bytes}; fetch it again"
        )


def _place(info: tuple[str, tuple[int, ...], int, int], data_start: Bytes, file_bytes: Bytes, path: Path) -> GgufTensor:
    name, shape, type_number, offset = info
    try:
        kind = GGMLQuantizationType(type_number)
    except ValueError:
        raise UnsupportedCheckpoint(f"{path}: tensor {name!r} has unknown type {type_number}; update `gguf`") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise CheckpointCorrupt(f"{path}: tensor {name!r} {shape} does not fill whole {kind.name} blocks of {block}")
    count = 1
    for dim in shape:
        count *= dim
    num_bytes = count // block * block_bytes
    start = data_start + offset
    if start + num_bytes > file_bytes:
        raise CheckpointCorrupt(
            f"{path}: truncated: tensor {name!r} ends at byte {start + num_bytes}, the file has {file_bytes}; "
            "fetch it again"
        )
    return GgufTensor(name, kind, shape, start, num_bytes)

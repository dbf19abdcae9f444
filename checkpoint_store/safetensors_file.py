"""Tensors of a safetensors file on disk: where they lie, and their bytes in blocks."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nearline.checkpoint_store.safetensors_header import LENGTH_BYTES, header_length, parse_header
from nearline.checkpoint_store.types import CHUNK_BYTES, TensorEntry
from nearline.protocol import Bytes
from nearline.protocol.errors import CheckpointCorrupt


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in one safetensors file. `is_last` marks the one whose bytes end the file."""

    path: Path
    entry: TensorEntry
    is_last: bool

    def blocks(self) -> Iterator[memoryview]:
        """Read the tensor's bytes, at most one chunk at a time, into one buffer that is used again."""
        return read_blocks(self.path, self.entry.offset, self.entry.num_bytes, self.entry.name)


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of a file, in the order of their bytes. Raises CheckpointCorrupt if it is torn or lies."""
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        length = header_length(file.read(LENGTH_BYTES), file_bytes, str(path))
        raw = file.read(length)
    if len(raw) != length:
        raise CheckpointCorrupt(f"{path}: header ends after {len(raw)} of {length} bytes; is the file being changed?")
    entries = list(parse_header(raw, file_bytes, str(path)).values())
    return {entry.name: StoredTensor(path, entry, entry is entries[-1]) for entry in entries}


def read_blocks(path: Path, offset: Bytes, num_bytes: Bytes, name: str) -> Iterator[memoryview]:
    """Read `num_bytes` from `offset` in blocks of at most CHUNK_BYTES. Raises CheckpointCorrupt at a short read."""
    buffer = memoryview(bytearray(min(num_bytes, CHUNK_BYTES)))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for done in range(0, num_bytes, CHUNK_BYTES):
            block = buffer[: num_bytes - done]
            if (got := fill(descriptor, block, offset + done)) < len(block):
                raise CheckpointCorrupt(
                    f"{path}: tensor {name!r} ends after {done + got} of {num_bytes} bytes; is the file being changed?"
                )
            yield block
    finally:
        os.close(descriptor)


def fill(descriptor: int, buffer: memoryview, offset: Bytes) -> Bytes:
    """Read into `buffer` from `offset` until it is full or the file ends; returns the bytes read."""
    done = 0
    while done < len(buffer) and (got := os.preadv(descriptor, [buffer[done:]], offset + done)):
        done += got
    return done

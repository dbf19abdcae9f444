"""Tensors of a safetensors file on disk: where they lie, and their bytes in blocks."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nearline.checkpoint_store.buffers import direct_buffer
from nearline.checkpoint_store.page_cache import is_cached
from nearline.checkpoint_store.safetensors_header import LENGTH_BYTES, header_length, parse_header
from nearline.checkpoint_store.types import CHUNK_BYTES, DATA_ALIGNMENT, TensorEntry
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
    buffer = _BUFFERS.pop() if _BUFFERS else direct_buffer(CHUNK_BYTES + 2 * DATA_ALIGNMENT)
    source = _Source(path)
    try:
        for done in range(0, num_bytes, CHUNK_BYTES):
            count = min(CHUNK_BYTES, num_bytes - done)
            block = source.read(buffer, offset + done, count)
            if len(block) < count:
                raise CheckpointCorrupt(
                    f"{path}: tensor {name!r} ends after {done + len(block)} of {num_bytes} bytes; is the file being "
                    "changed?"
                )
            yield block
    finally:
        source.close()
        _BUFFERS.append(buffer)


class _Source:
    """A file read from the page cache where it lies there, as after a download, and past it where it does not."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct_fd: int | None = None
        with contextlib.suppress(OSError):
            self._direct_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def read(self, buffer: memoryview, offset: Bytes, count: Bytes) -> memoryview:
        """Read into `buffer`, two alignments longer than `count`; what is returned is shorter where the file ends."""
        skip = offset % DATA_ALIGNMENT
        block = buffer[skip : skip + count]
        got = self._read_cached(block, offset) if self._direct_fd is not None else 0
        if got < count and self._direct_fd is not None:
            padded = -(-(skip + count) // DATA_ALIGNMENT) * DATA_ALIGNMENT
            got = self._read_direct(buffer[:padded], offset - skip) - skip
        if got < count:
            got = fill(self._fd, block, offset)
        return block[:got]

    def close(self) -> None:
        os.close(self._fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def _read_cached(self, block: memoryview, offset: Bytes) -> Bytes:
        try:
            return os.preadv(self._fd, [block], offset, os.RWF_NOWAIT) if is_cached(self._fd, offset, len(block)) else 0
        except (OSError, ValueError):  # it left the page cache meanwhile, the file ends, or the file system cannot tell
            return 0

    def _read_direct(self, block: memoryview, start: Bytes) -> Bytes:
        assert self._direct_fd is not None
        done = 0
        try:
            while done < len(block) and (got := os.preadv(self._direct_fd, [block[done:]], start + done)):
                done += got
        except OSError:  # refused, or the end of the file was not on a block; the buffered read says what is wrong
            return 0
        return done


_BUFFERS: list[memoryview] = []
"""Read buffers that nobody uses: memory touched once is used again."""


def fill(descriptor: int, buffer: memoryview, offset: Bytes) -> Bytes:
    """Read into `buffer` from `offset` until it is full or the file ends; returns the bytes read."""
    done = 0
    while done < len(buffer) and (got := os.preadv(descriptor, [buffer[done:]], offset + done)):
        done += got
    return done

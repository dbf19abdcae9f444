"""Writes one weights file from a stream of blocks and reads every piece back: threads write and check with direct I/O
while the caller reads its source, so that the disk is never idle and nothing goes through the page cache.
"""

import errno
import os
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from nearline.checkpoint_store.buffers import direct_buffer
from nearline.checkpoint_store.types import CHUNK_BYTES, DATA_ALIGNMENT
from nearline.protocol import Bytes
from nearline.protocol.errors import CheckpointCorrupt

_PIECE_BYTES: Bytes = CHUNK_BYTES // 2
_NUM_PIECES = 4
_NUM_WRITERS = 3
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class WeightsWriter:
    """A new file, written in order. Owns two chunks of memory, its threads and the file descriptor, until `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._direct_fd: int | None = self._open_direct()
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(_NUM_PIECES):
            self._free.put(direct_buffer(_PIECE_BYTES))
        self._threads = ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="nearline-write")
        self._under_way: list[Future[None]] = []
        self._piece, self._filled = self._free.get(), 0
        self.num_bytes = 0
        """Bytes taken so far."""

    def write(self, block: bytes | bytearray | memoryview) -> None:
        """Take the next bytes. Raises what an earlier write raised: OSError, or CheckpointCorrupt when a piece does not
        read back."""
        view = memoryview(block).cast("B")
        while len(view):
            part = view[: _PIECE_BYTES - self._filled]
            self._piece[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            self.num_bytes += len(part)
            view = view[len(part) :]
            if self._filled == _PIECE_BYTES:
                self._send_off()
                self._piece = self._free.get()

    def finish(self) -> None:
        """Wait until everything is on disk and has been found right there. Raises as `write`."""
        if self._filled:
            self._send_off()
        for future in self._under_way:
            future.result()
        self._under_way.clear()
        os.ftruncate(self._fd, self.num_bytes)  # the last piece was padded to a whole block
        os.fsync(self._fd)

    def close(self) -> None:
        """End the threads and close the file, finished or not."""
        self._threads.shutdown(cancel_futures=True)
        os.close(self._fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def _send_off(self) -> None:
        done = [future for future in self._under_way if future.done()]
        self._under_way = [future for future in self._under_way if not future.done()]
        for future in done:
            future.result()
        start = self.num_bytes - self._filled
        self._under_way.append(self._threads.submit(self._store, self._piece, start, self._filled))
        self._filled = 0

    def _store(self, piece: memoryview, start: Bytes, count: Bytes) -> None:
        try:
            digest = xxhash.xxh3_128_digest(piece[:count])
            self._write_out(piece, start, count)
            got = self._read_back(piece, start, count)
            if got < count or xxhash.xxh3_128_digest(piece[:count]) != digest:
                raise CheckpointCorrupt(
                    f"{self._path}: bytes {start} to {start + count} do not read back as they were written; "
                    "check the disk, then import again"
                )
        finally:
            self._free.put(piece)

    def _write_out(self, piece: memoryview, start: Bytes, count: Bytes) -> None:
        padded = -(-count // DATA_ALIGNMENT) * DATA_ALIGNMENT
        piece[count:padded] = bytes(padded - count)
        done = 0
        while done < padded:
            done += self._try_direct(os.pwritev, piece[done:padded], start + done)

    def _read_back(self, piece: memoryview, start: Bytes, count: Bytes) -> Bytes:
        padded, done = -(-count // DATA_ALIGNMENT) * DATA_ALIGNMENT, 0
        while done < count:
            got = self._try_direct(os.preadv, piece[done:padded], start + done)
            if not got:
                break
            done += got
        return done

    def _try_direct(self, call: Callable[[int, list[memoryview], int], int], view: memoryview, offset: Bytes) -> Bytes:
        """Write or read directly; where that is refused, through the page cache."""
        direct_fd = self._direct_fd
        if direct_fd is not None and offset % DATA_ALIGNMENT == 0:
            try:
                return call(direct_fd, [view], offset)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
        return call(self._fd, [view], offset)

    def _open_direct(self) -> int | None:
        try:
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return None

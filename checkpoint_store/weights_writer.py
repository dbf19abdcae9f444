"""Writes one weights file from a stream of blocks: threads write with direct I/O while the caller reads its source, so
that the disk is never idle and nothing goes through the page cache. What is on disk is checked by the first load.
"""

import errno
import os
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from nearline.checkpoint_store.buffers import direct_buffer
from nearline.checkpoint_store.types import CHUNK_BYTES, DATA_ALIGNMENT
from nearline.protocol import Bytes

_PIECE_BYTES: Bytes = CHUNK_BYTES // 2
_NUM_PIECES = 4
_NUM_WRITERS = 3
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class WeightsWriter:
    """A new file, written in order. Owns two chunks of memory, its threads and the file descriptor, until `close`."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
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
        """Take the next bytes. Raises what an earlier write raised."""
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
        """Wait until everything is on disk. Raises as `write`."""
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
        padded, done = -(-count // DATA_ALIGNMENT) * DATA_ALIGNMENT, 0
        piece[count:padded] = bytes(padded - count)
        try:
            while done < padded:
                done += self._write_some(piece[done:padded], start + done)
        finally:
            self._free.put(piece)

    def _write_some(self, view: memoryview, offset: Bytes) -> Bytes:
        """Write directly; where that is refused, through the page cache."""
        direct_fd = self._direct_fd
        if direct_fd is not None and offset % DATA_ALIGNMENT == 0:
            try:
                return os.pwritev(direct_fd, [view], offset)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
        return os.pwritev(self._fd, [view], offset)

    def _open_direct(self) -> int | None:
        try:
            return os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return None

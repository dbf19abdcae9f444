"""A short look at the disk when a store opens, so that the first estimate rests on a measurement."""

import itertools
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nearline.checkpoint_store.weights_file import WeightsFile
from nearline.protocol import Bytes, Seconds
from nearline.protocol.errors import CheckpointCorrupt

_LIMIT_S: Seconds = 0.3
_BLOCK_BYTES = 4 * 1024 * 1024
_NUM_READERS = 4


class DiskProbe:
    """Reads one file with direct I/O for at most 0.3 s in the background and reports (bytes, seconds).

    Reports nothing when the file system refuses direct I/O: the page cache would answer instead of the disk.
    """

    def __init__(self, path: Path, num_bytes: Bytes, on_measured: Callable[[Bytes, Seconds], None]) -> None:
        self._path = path
        self._num_bytes = num_bytes
        self._on_measured = on_measured
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nearline-probe", daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        """Somebody needs the disk: report what was measured so far and end."""
        self._stop.set()

    def join(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            file = WeightsFile(self._path, self._num_bytes)
        except CheckpointCorrupt:
            return  # the load that needs this file will say so
        blocks = itertools.count()
        done: list[Bytes] = []
        started_at = time.monotonic()
        readers = [threading.Thread(target=self._read, args=(file, blocks, done)) for _ in range(_NUM_READERS)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        elapsed_s = time.monotonic() - started_at
        if file.is_direct:
            self._on_measured(sum(done), elapsed_s)
        file.close()

    def _read(self, file: WeightsFile, blocks: "itertools.count[int]", done: list[Bytes]) -> None:
        deadline = time.monotonic() + _LIMIT_S
        with mmap.mmap(-1, _BLOCK_BYTES) as buffer, memoryview(buffer) as view:
            while file.is_direct and not self._stop.is_set() and time.monotonic() < deadline:
                offset = next(blocks) * _BLOCK_BYTES
                if offset + _BLOCK_BYTES > self._num_bytes:
                    return
                try:
                    file.read_into(view, offset)
                except CheckpointCorrupt:
                    return
                done.append(_BLOCK_BYTES)

"""Streams a weights file to a device through a few chunks of host memory, for a checkpoint the DRAM pool cannot hold.

Several threads, each with a chunk of the window: read, check the digest, copy, take the next. While one copies others
read, so disk and PCIe overlap. Chunks are taken in order, so the forward pass can follow.
"""

import threading
from pathlib import Path
from typing import Protocol

import torch

from nearline.checkpoint_store import Manifest, WeightsFile, check_digest
from nearline.loader.pinned import pinned_memory
from nearline.protocol import Bytes, Seconds
from nearline.protocol.errors import InstanceFailed, NearlineError

NUM_READERS = 4
"""Chunks of host memory a stream takes, and reads in flight."""


class StreamTarget(Protocol):
    """One range of a device, as long as the weights file."""

    def lend(self, num_bytes: Bytes) -> torch.Tensor:
        """Give host memory, uint8, that `copy` copies from; it is the caller's until dropped."""

    def copy(self, start: Bytes, source: torch.Tensor) -> None:
        """Copy host bytes into the range; when this returns they are there, and `source` may change."""


class CudaRange:
    """A range of a CUDA device. Called by several threads; each copy runs on a stream of its own."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        # The range may be memory that queued work of the compute stream still reads.
        self._is_free = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_free.record(torch.cuda.current_stream(target.device))

    def lend(self, num_bytes: Bytes) -> torch.Tensor:
        return pinned_memory(num_bytes)

    def copy(self, start: Bytes, source: torch.Tensor) -> None:
        with torch.cuda.device(self._target.device):
            stream = torch.cuda.Stream(self._target.device)  # type: ignore[no-untyped-call]
            stream.wait_event(self._is_free)
            with torch.cuda.stream(stream):
                self._target[start : start + source.numel()].copy_(source, non_blocking=True)
            stream.synchronize()


class FileStream:
    """Brings a checkpoint's chunks to a device, each checked against its digest before it is copied.

    Owns: the threads, the open file and the window, until the last chunk is there, one fails, or `close`.
    """

    def __init__(
        self, path: Path, manifest: Manifest, target: StreamTarget, stall_s: Seconds, num_readers: int = NUM_READERS
    ) -> None:
        """Start. Raises CheckpointCorrupt if the file is missing or of another size."""
        self._manifest, self._target, self._stall_s = manifest, target, stall_s
        num_chunks = len(manifest.chunk_digests)
        self._has_arrived = [False] * num_chunks
        self._num_arrived = self._num_taken = 0
        self._failure: NearlineError | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._file = WeightsFile(path, manifest.num_bytes)
        self._num_readers = min(num_readers, num_chunks)
        self._threads = [
            threading.Thread(target=self._run, name=f"nearline-stream-{i}", daemon=True)
            for i in range(self._num_readers)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, first: int, last: int) -> None:
        with self._changed:
            while not all(self._has_arrived[first : last + 1]):
                self._raise_failure()
                if self._is_closed:
                    raise InstanceFailed(f"checkpoint {self._manifest.digest} was closed while it was loading")
                before = self._num_arrived
                if not self._changed.wait(self._stall_s) and self._num_arrived == before:
                    raise InstanceFailed(
                        f"checkpoint {self._manifest.digest}: none of its chunks has come from {self._file.path} for "
                        f"{self._stall_s:.0f} s; the disk or the device is stuck"
                    )

    def is_complete(self) -> bool:
        with self._changed:
            self._raise_failure()
            return self._num_arrived == len(self._has_arrived)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(self._failure.message)

    def _run(self) -> None:
        try:
            buffer = self._target.lend(self._manifest.chunk_bytes)
            while (index := self._take()) is not None:
                self._bring(index, buffer)
        except NearlineError as error:
            self._fail(type(error)(error.message))  # without a traceback: its frames would hold the window
        except Exception as error:  # a thread's exception would be lost, and wait() would hang
            self._fail(InstanceFailed(f"streaming {self._file.path} to the device failed: {error}"))
        finally:
            with self._changed:
                self._num_readers -= 1
                if not self._num_readers:
                    self._file.close()

    def _take(self) -> int | None:
        with self._changed:
            if self._is_closed or self._failure or self._num_taken == len(self._has_arrived):
                return None
            self._num_taken += 1
            return self._num_taken - 1

    def _bring(self, index: int, buffer: torch.Tensor) -> None:
        start = index * self._manifest.chunk_bytes
        source = buffer[: min(self._manifest.chunk_bytes, self._manifest.num_bytes - start)]
        with memoryview(source.numpy()) as view:  # type: ignore[arg-type]
            self._file.read_into(view, start)
            check_digest(view, self._manifest.chunk_digests[index], f"{self._file.path}: chunk {index} (byte {start})")
        self._target.copy(start, source)
        with self._changed:
            self._has_arrived[index] = True
            self._num_arrived += 1
            self._changed.notify_all()

    def _fail(self, error: NearlineError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

"""Copies pool frames to a CUDA device as they arrive: disk and PCIe overlap, the forward pass follows the copies."""

import threading
from collections.abc import Sequence

import torch

from nearline.loader.pinned import PinnedFrames
from nearline.loader.ready import FrameArrival
from nearline.protocol import Bytes
from nearline.protocol.errors import InstanceFailed, NearlineError


class DeviceCopy:
    """Copies a checkpoint's chunks, in order, from their frames into one device range, on a stream of its own.

    A thread waits for each frame and queues its copy; an event after each copy tells the compute stream when it may
    read. Owns: the thread, until `close`, which also waits for copies under way, so that frames may be reused.
    """

    def __init__(
        self,
        source: PinnedFrames,
        frames: Sequence[int],
        chunk_bytes: Bytes,
        arrival: FrameArrival,
        target: torch.Tensor,
    ) -> None:
        """`target` is as long as the weights file; chunk i goes to its bytes from i · chunk_bytes on."""
        self._source = source
        self._frames = frames
        self._chunk_bytes = chunk_bytes
        self._arrival = arrival
        self._target = target
        self._stream = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
        # The range may be memory that queued work of the compute stream still reads.
        self._stream.wait_stream(torch.cuda.current_stream(target.device))
        self._events: list[torch.cuda.Event] = []
        self._failure: NearlineError | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="nearline-copy", daemon=True)
        self._thread.start()

    def wait(self, first: int, last: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) > last or self._failure or self._is_closed)
            if len(self._events) <= last:
                raise self._failure or InstanceFailed("the checkpoint was closed while it was loading")
            event = self._events[last]
        # Copies are queued in order on one stream, so the last event covers all before it.
        event.wait(torch.cuda.current_stream(self._target.device))

    def is_complete(self) -> bool:
        with self._changed:
            return len(self._events) == len(self._frames) and bool(self._events[-1].query())  # type: ignore[no-untyped-call]

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._arrival.close()
        self._thread.join()
        self._stream.synchronize()

    def _run(self) -> None:
        try:
            with torch.cuda.device(self._target.device), torch.cuda.stream(self._stream):
                for index in range(len(self._frames)):
                    self._arrival.wait(index, index)
                    if self._is_closed:
                        return
                    self._copy(index)
        except NearlineError as error:
            self._fail(error)
        except Exception as error:  # a thread's exception would be lost, and wait() would hang
            self._fail(InstanceFailed(f"copying chunk {len(self._events)} to {self._target.device} failed: {error}"))

    def _copy(self, index: int) -> None:
        start = index * self._chunk_bytes
        count = min(self._chunk_bytes, self._target.numel() - start)
        source = self._source.source(self._frames[index], count, self._target.device)
        self._target[start : start + count].copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _fail(self, error: NearlineError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

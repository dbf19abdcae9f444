"""Reads adapters beside the step loop, one at a time, so that a slow disk delays only those who wait for it.

Memory for the next one is touched when no other thread wants the processor: right after a read, those who waited do.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from nearline.engine.adapter_memory import USUAL_BYTES, AdapterMemory
from nearline.protocol import Bytes, Digest, Seconds
from nearline.protocol.errors import ErrorInfo

Load = Callable[[AdapterMemory], Bytes]


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """How the reading of one adapter ended. `owner` and `lease_id` are what `start` was given."""

    owner: object
    digest: Digest
    load_s: Seconds
    num_bytes: Bytes
    error: ErrorInfo | None
    lease_id: int


class AdapterReader:
    """Owns two daemon threads, and those that hang in a read given up. `on_done` is called from one whenever `finished`
    has something new."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._memory = AdapterMemory()
        self._jobs: queue.SimpleQueue[tuple[object, Digest, Load, int]] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[AdapterRead] = queue.SimpleQueue()
        self._wishes: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self._wishes.put(USUAL_BYTES)
        self._reading: Digest | None = None
        self._begin()
        threading.Thread(target=self._prepare, name="adapter-memory", daemon=True).start()

    def start(self, owner: object, digest: Digest, load: Load, lease_id: int = 0) -> None:
        """Queue a read. `load` runs in the thread, with memory to read into, and returns the bytes it took."""
        self._jobs.put((owner, digest, load, lease_id))

    def give_up(self, digest: Digest) -> None:
        """Let others read on beside a read that hangs. It ends as all do, if ever: `finished` tells of it late."""
        if self._reading == digest:
            self._begin()

    def finished(self) -> list[AdapterRead]:
        """Return the reads that have ended since the last call."""
        reads = []
        while not self._finished.empty():
            reads.append(self._finished.get())
        return reads

    def _begin(self) -> None:
        self._reading = None
        self._worker = threading.Thread(target=self._work, name="adapter-reader", daemon=True)
        self._worker.start()

    def _work(self) -> None:
        while self._worker is threading.current_thread():
            owner, digest, load, lease_id = self._jobs.get()
            self._reading = digest
            started_at = time.monotonic()
            num_bytes, failure = 0, None
            try:
                num_bytes = load(self._memory)
            except Exception as error:
                failure = ErrorInfo.of(error)
            load_s = time.monotonic() - started_at
            if self._worker is threading.current_thread():
                self._reading = None
            self._finished.put(AdapterRead(owner, digest, load_s, num_bytes, failure, lease_id))
            del owner, load  # let go of the model while waiting for the next job
            self._on_done()
            if num_bytes and self._jobs.empty():
                self._wishes.put(num_bytes)

    def _prepare(self) -> None:
        with contextlib.suppress(OSError):  # of this thread alone, and only advice
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        while True:
            self._memory.prepare(self._wishes.get())

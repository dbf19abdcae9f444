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


@dataclass(frozen=True, slots=True, eq=False)
class AdapterJob:
    """One read: whose, of what, by which work, from which lease (0: none)."""

    owner: object
    digest: Digest
    load: Load
    lease_id: int


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
    has something new. A read may take `limit_s`, not counting its turn: others hang or are long, it is not at fault."""

    def __init__(self, on_done: Callable[[], None], limit_s: Seconds) -> None:
        self._on_done = on_done
        self._limit_s = limit_s
        self._memory = AdapterMemory()
        self._queue: queue.SimpleQueue[AdapterJob] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[AdapterRead] = queue.SimpleQueue()
        self._wishes: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self._wishes.put(USUAL_BYTES)
        self._lock = threading.Lock()
        self._jobs: dict[AdapterJob, Seconds | None] = {}
        """Those not given up, and when the one under way began."""
        self._begin()
        threading.Thread(target=self._prepare, name="adapter-memory", daemon=True).start()

    def start(self, owner: object, digest: Digest, load: Load, lease_id: int = 0) -> None:
        """Queue a read. `load` runs in the thread, with memory to read into, and returns the bytes it took."""
        job = AdapterJob(owner, digest, load, lease_id)
        with self._lock:
            self._jobs[job] = None
        self._queue.put(job)

    def overdue(self, now: Seconds) -> list[AdapterJob]:
        """Give up the read that takes too long, and return it: the next ones are read beside it. It ends as all do, if
        ever: `finished` tells of it late."""
        with self._lock:
            late = [job for job, at in self._jobs.items() if at is not None and at + self._limit_s <= now]
            for job in late:
                del self._jobs[job]
        if late:
            self._begin()
        return late

    def next_due(self, now: Seconds) -> Seconds | None:
        """When `overdue` may name one: not before."""
        with self._lock:
            return min((self._limit_s + (now if at is None else at) for at in self._jobs.values()), default=None)

    def give_up_all(self) -> None:
        """Let go of all reads: `finished` will name them, without bytes those that had not begun."""
        with self._lock:
            is_reading = any(at is not None for at in self._jobs.values())
            self._jobs.clear()
        if is_reading:
            self._begin()

    def finished(self) -> list[AdapterRead]:
        """Return the reads that have ended since the last call."""
        reads = []
        while not self._finished.empty():
            reads.append(self._finished.get())
        return reads

    def _begin(self) -> None:
        threading.Thread(target=self._work, name="adapter-reader", daemon=True).start()

    def _work(self) -> None:
        """Read until a read is given up: then another thread goes on with the others."""
        is_awaited = True
        while is_awaited:
            job = self._queue.get()
            started_at = time.monotonic()
            with self._lock:
                is_wanted = job in self._jobs
                if is_wanted:
                    self._jobs[job] = started_at
            num_bytes, failure = 0, None
            try:
                num_bytes = job.load(self._memory) if is_wanted else 0
            except Exception as error:
                failure = ErrorInfo.of(error)
            load_s = time.monotonic() - started_at
            with self._lock:
                is_awaited = self._jobs.pop(job, None) is not None or not is_wanted
            self._finished.put(AdapterRead(job.owner, job.digest, load_s, num_bytes, failure, job.lease_id))
            del job  # let go of the model while waiting for the next one
            self._on_done()
            if num_bytes and self._queue.empty():
                self._wishes.put(num_bytes)

    def _prepare(self) -> None:
        with contextlib.suppress(OSError):  # of this thread alone, and only advice
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        while True:
            self._memory.prepare(self._wishes.get())

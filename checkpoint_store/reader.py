"""Threads that read chunks from disk into pool frames, and check their digests when asked.

Knows files and frames; who wants a chunk and why is the store's business. Jobs that somebody waits for come first, in
order of arrival, but one that is far shorter than the first takes turns with it: an adapter does not wait for a whole
model. Within a job chunks are taken in order by whichever thread is free, so they finish in order.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from nearline.checkpoint_store.depth import ReaderDepth
from nearline.checkpoint_store.pool import DramPool
from nearline.checkpoint_store.weights_file import FileStamp, WeightsFile, check_digest
from nearline.protocol import Bytes, Digest, Seconds
from nearline.protocol.errors import CheckpointCorrupt

_NUM_CORES = len(os.sched_getaffinity(0))
_WINDOW_CHUNKS = 16
"""Chunks per bandwidth measurement."""
_FAR_SHORTER = 8
"""A job with at most one chunk left to so many of the first one's takes turns with it."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """Bring file bytes [offset, offset + num_bytes) into the pool, from byte `at` on, a multiple of 4096."""

    index: int
    at: Bytes
    offset: Bytes
    num_bytes: Bytes
    digest: str


class ReadJob:
    """Some chunks of one checkpoint to read, in order. Digests are checked unless the file still carries the stamp
    under which they were checked before."""

    def __init__(
        self,
        digest: Digest,
        path: Path,
        file_bytes: Bytes,
        chunks: Iterable[ChunkRead],
        trusted_stamp: FileStamp | None,
        is_urgent: bool,
    ) -> None:
        self.digest = digest
        self.path = path
        self.file_bytes = file_bytes
        self.queue = deque(chunks)
        self.trusted_stamp = trusted_stamp
        self.is_urgent = is_urgent
        self.num_active = 0
        self.is_open = True
        self._file: WeightsFile | None = None
        self._file_lock = threading.Lock()

    @property
    def stamp(self) -> FileStamp | None:
        """Stamp of the file as opened; None before the first read or when opening failed."""
        return self._file.stamp if self._file else None

    @property
    def is_verifying(self) -> bool:
        return self.stamp is None or self.stamp != self.trusted_stamp

    @property
    def has_place(self) -> bool:
        """Whether one more reader makes it faster: what the processor copies gains nothing beyond its cores."""
        is_copied = self._file is not None and not self._file.is_direct
        return bool(self.queue) and (not is_copied or self.num_active < _NUM_CORES)

    def file(self) -> WeightsFile:
        with self._file_lock:
            if self._file is None:
                self._file = WeightsFile(self.path, self.file_bytes)
            return self._file

    def close(self) -> None:
        self.is_open = False
        if self._file is not None:
            if self._file.refusal:
                log.info("read through the page cache", path=str(self.path), reason=self._file.refusal)
            self._file.close()


ChunkDone = Callable[[ReadJob, ChunkRead, CheckpointCorrupt | None], None]
Window = Callable[[Bytes, Seconds], None]
_Part = Callable[[ReadJob, ChunkRead, memoryview], None]


class ChunkReader:
    """Owns the reading threads. `on_chunk` is called for every chunk started, exactly once, from a reading thread and
    without a lock held; `on_window` gets bytes and seconds of busy reading, for the estimate."""

    def __init__(self, pool: DramPool, max_readers: int, on_chunk: ChunkDone, on_window: Window) -> None:
        self._pool = pool
        self._on_chunk = on_chunk
        self._on_window = on_window
        self._depth = ReaderDepth(max_readers)
        self._wake = threading.Condition()
        self._jobs: list[ReadJob] = []
        self._is_closed = False
        self._has_overtaken = False
        self._num_active = 0
        self._window_started_at = 0.0
        self._window_bytes = 0
        self._window_chunks = 0
        num_threads = max_readers + _NUM_CORES  # some check what they have read while others read on
        self._threads = [
            threading.Thread(target=self._work, name=f"nearline-read-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: ReadJob) -> None:
        with self._wake:
            self._jobs.append(job)
            # Only as many as will find work: every thread woken competes with the caller for the interpreter.
            self._wake.notify(min(len(job.queue), max(self._depth.num_readers - self._num_active, 0)))

    def promote(self, job: ReadJob) -> None:
        """Somebody waits for this job now: read it before those nobody waits for."""
        with self._wake:
            job.is_urgent = True

    def cancel(self, job: ReadJob) -> list[ChunkRead]:
        """Take back the chunks that have not been started and return them; those being read still report."""
        with self._wake:
            dropped = list(job.queue)
            job.queue.clear()
            if not job.num_active:
                self._retire(job)
            return dropped

    def queued_bytes(self) -> Bytes:
        """Bytes that wait for the disk ahead of a job submitted now."""
        with self._wake:
            return sum(chunk.num_bytes for job in self._jobs for chunk in job.queue)

    def close(self) -> None:
        """Drop what is queued, let running reads finish and end the threads."""
        with self._wake:
            self._is_closed = True
            for job in list(self._jobs):
                job.queue.clear()
                if not job.num_active:
                    self._retire(job)
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._is_closed or self._has_work())
                if self._is_closed:
                    return
                job = self._next_job()
                chunk = job.queue.popleft()
                job.num_active += 1
                self._enter()
            error = self._tried(self._read, job, chunk)
            if error is None and job.is_verifying:
                self._left(chunk.num_bytes, is_followed=True)
                error = self._tried(self._check, job, chunk)
                self._on_chunk(job, chunk, error)
            else:
                self._on_chunk(job, chunk, error)
                self._left(0 if error else chunk.num_bytes)
            with self._wake:
                job.num_active -= 1
                if not job.queue and not job.num_active:
                    self._retire(job)

    def _has_work(self) -> bool:
        return self._num_active < self._depth.num_readers and any(job.has_place for job in self._jobs)

    def _next_job(self) -> ReadJob:
        with_chunks = [job for job in self._jobs if job.has_place]
        urgent = [job for job in with_chunks if job.is_urgent]
        if not urgent:
            return with_chunks[0]
        first, shortest = urgent[0], min(urgent, key=lambda job: len(job.queue))
        is_overtaking = not self._has_overtaken and len(shortest.queue) * _FAR_SHORTER <= len(first.queue)
        self._has_overtaken = is_overtaking
        return shortest if is_overtaking else first

    def _retire(self, job: ReadJob) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
            job.close()

    @staticmethod
    def _read(job: ReadJob, chunk: ChunkRead, view: memoryview) -> None:
        job.file().read_into(view, chunk.offset)

    @staticmethod
    def _check(job: ReadJob, chunk: ChunkRead, view: memoryview) -> None:
        check_digest(view, chunk.digest, f"{job.path}: chunk {chunk.index} (byte {chunk.offset})")

    def _tried(self, part: _Part, job: ReadJob, chunk: ChunkRead) -> CheckpointCorrupt | None:
        try:
            with self._pool.bytes_at(chunk.at, chunk.num_bytes) as view:
                part(job, chunk, view)
        except CheckpointCorrupt as error:
            return CheckpointCorrupt(error.message)  # without a traceback: its frames would hold views of the pool
        except Exception as error:  # a reading thread must outlive any surprise, and the lease must hear of it
            log.exception("reading a chunk failed", path=str(job.path), chunk=chunk.index)
            return CheckpointCorrupt(f"{job.path}: chunk {chunk.index} cannot be read ({error})")
        return None

    def _enter(self) -> None:
        if self._num_active == 0:
            self._start_window()
        self._num_active += 1

    def _left(self, num_bytes: Bytes, is_followed: bool = False) -> None:
        """Count a reader out. `is_followed`: it has something else to do, so another thread takes its place."""
        with self._wake:
            window = self._leave(num_bytes)
            if is_followed:
                self._wake.notify()
        if window:
            self._on_window(*window)

    def _start_window(self) -> None:
        self._window_started_at = time.monotonic()
        self._window_bytes = self._window_chunks = 0

    def _leave(self, num_bytes: Bytes) -> tuple[Bytes, Seconds] | None:
        self._num_active -= 1
        self._window_bytes += num_bytes
        self._window_chunks += 1
        is_idle = self._num_active == 0 and not any(job.queue for job in self._jobs)
        is_full = self._window_chunks >= _WINDOW_CHUNKS
        if not (is_full or is_idle) or not self._window_bytes:
            return None
        window = self._window_bytes, max(time.monotonic() - self._window_started_at, 1e-9)
        if is_full:
            before = self._depth.num_readers
            added = self._depth.observe(window[0] / window[1]) - before
            self._wake.notify(max(added, 0))
        self._start_window()
        return window

"""Errands on checkpoints that somebody waits for: verify one, give its DRAM back. Each in a thread, each answered."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from nearline.checkpoint_store import CheckpointStore
from nearline.protocol import Bytes, Digest, Seconds, TaskId
from nearline.protocol.errors import Cancelled, ErrorInfo
from nearline.protocol.frames import EvictCheckpoint, TaskFailed, TaskFinished, TaskProgress, VerifyCheckpoint

PROGRESS_INTERVAL_S: Seconds = 0.1
log = structlog.get_logger()


class Errands:
    """Owns the threads of errands. `send` passes messages to the controller and is called in the event loop.

    Verifications queue: each alone can fill the disk.
    """

    def __init__(self, store: CheckpointStore, send: Callable[[object], None]) -> None:
        self._store = store
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._cancelled: dict[TaskId, threading.Event] = {}
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="nearline-verify")
        self._evictor = ThreadPoolExecutor(1, thread_name_prefix="nearline-evict")

    def verify(self, wish: VerifyCheckpoint) -> None:
        """Check a checkpoint's bytes on SSD against their digests, reporting progress."""
        cancelled = self._cancelled[wish.task_id] = threading.Event()
        progress = _Progress(wish.task_id, cancelled, self._post)

        def work() -> Bytes:
            return self._store.verify(wish.digest, progress).num_bytes

        self._send(TaskProgress(wish.task_id, "queued", 0, 0))
        self._start(self._verifier, wish.task_id, wish.digest, work)

    def evict(self, wish: EvictCheckpoint) -> None:
        """Free the DRAM of an unpinned checkpoint; without a task id nobody hears of it."""
        self._start(self._evictor, wish.task_id, wish.digest, lambda: self._store.evict(wish.digest))

    def cancel(self, task_id: TaskId) -> None:
        """Stop a verification at its next chunk; TaskFailed follows."""
        if task_id in self._cancelled:
            self._cancelled[task_id].set()

    def close(self) -> None:
        """Stop all errands and wait for their threads."""
        for cancelled in self._cancelled.values():
            cancelled.set()
        for threads in (self._verifier, self._evictor):
            threads.shutdown(cancel_futures=True)

    def _start(
        self, threads: ThreadPoolExecutor, task_id: TaskId | None, digest: Digest, work: Callable[[], Bytes]
    ) -> None:
        def timed() -> tuple[Bytes, Seconds]:
            started_at = time.monotonic()
            return work(), time.monotonic() - started_at

        future = self._loop.run_in_executor(threads, timed)
        future.add_done_callback(lambda done: self._finish(task_id, digest, done))

    def _finish(self, task_id: TaskId | None, digest: Digest, done: "asyncio.Future[tuple[Bytes, Seconds]]") -> None:
        if task_id is not None:
            self._cancelled.pop(task_id, None)
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            info = ErrorInfo.of(error)
            log.warning("errand failed", digest=digest, code=info.code, error=info.message)
        if task_id is not None:
            self._send(TaskFinished(task_id, *done.result()) if error is None else TaskFailed(task_id, info))

    def _post(self, message: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: the agent is going
            self._loop.call_soon_threadsafe(self._send, message)


class _Progress:
    """Passes progress on, only so often, and ends a verification that was cancelled. Called in its thread."""

    def __init__(self, task_id: TaskId, cancelled: threading.Event, post: Callable[[object], None]) -> None:
        self._task_id, self._cancelled, self._post = task_id, cancelled, post
        self._next_at = 0.0

    def __call__(self, done_bytes: Bytes, total_bytes: Bytes) -> None:
        if self._cancelled.is_set():
            raise Cancelled("the verification was cancelled")
        now = time.monotonic()
        if now >= self._next_at or done_bytes == total_bytes:
            self._next_at = now + PROGRESS_INTERVAL_S
            self._post(TaskProgress(self._task_id, "verifying", done_bytes, total_bytes))

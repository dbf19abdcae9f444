"""The hands that run jobs: read, lease, run, end. Any of them may vanish at any moment; another takes over."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import structlog
from redis.exceptions import ResponseError

from nearline.controller.durable.jobs import GROUP, Job, JobStore
from nearline.controller.durable.redis_state import State, state_errors
from nearline.controller.policy.jobs import PAUSES_S, Expire, Fail, verdict
from nearline.protocol import JobId
from nearline.protocol.errors import Cancelled, NearlineError, StateUnavailable, StorageFull

log = structlog.get_logger(__name__)

RunJob = Callable[[Job, Callable[[], Awaitable[None]]], Awaitable[dict[str, Any]]]
"""Runs one attempt and returns its result; it awaits the callback when the first token is there."""

BACKOFF_S = PAUSES_S


class JobWorker:
    """Runs up to `max_running` jobs at once under the name `consumer`. Owns: their tasks and leases.

    `is_heir`: no other worker is alive (the leader lease says so), so what they held is taken over at once.
    """

    def __init__(
        self,
        state: State,
        store: JobStore,
        run: RunJob,
        consumer: str,
        max_running: int = 32,
        lease_s: float = 15.0,
        is_heir: bool = True,
    ) -> None:
        self._state = state
        self._store = store
        self._run = run
        self._consumer = consumer
        self._free = asyncio.Semaphore(max_running)
        self._lease_s = lease_s
        self._is_heir = is_heir
        self._tasks: dict[JobId, asyncio.Task[None]] = {}
        self._over: set[asyncio.Task[None] | None] = set()
        self._ending: set[JobId] = set()
        store.on_ended(self._ended)

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    async def serve(self) -> None:
        """Work until cancelled; jobs under way are then handed back to the queue."""
        try:
            await self._forever("takeover", self._ensure_group)
            if self._is_heir:
                await self._forever("takeover", lambda: self._take_over(0.0))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._loop("read", self._read, 0.0))
                group.create_task(self._loop("tick", self._store.tick, 0.25))
                group.create_task(self._loop("takeover", lambda: self._take_over(self._lease_s), self._lease_s / 2))
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forever(self, name: str, step: Callable[[], Awaitable[Any]]) -> None:
        """Repeat `step` until the state store lets it succeed."""
        delay_s = 0.1
        while True:
            try:
                await step()
            except (StateUnavailable, StorageFull) as error:
                log.warning("jobs_interrupted", step=name, error=error.message)
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 5.0)
            else:
                return

    async def _loop(self, name: str, step: Callable[[], Awaitable[Any]], pause_s: float) -> None:
        while True:
            await self._forever(name, step)
            await asyncio.sleep(pause_s)

    async def _ensure_group(self) -> None:
        async with state_errors():
            try:
                await self._state.redis.xgroup_create(self._store.stream, GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    async def _read(self) -> None:
        await self._free.acquire()
        entries: list[Any] = []
        try:
            async with state_errors():
                read = self._state.redis.xreadgroup(GROUP, self._consumer, {self._store.stream: ">"}, 1, block=2000)
                answer = await read
            entries = answer[0][1] if answer else []
        except StateUnavailable as error:
            if "NOGROUP" in error.message:  # the server lost its data: begin anew
                await self._ensure_group()
            raise
        finally:
            if not entries:
                self._free.release()
        for entry, fields in entries:
            self._start(entry, fields["id"])

    async def _take_over(self, min_idle_s: float) -> None:
        """Claim entries whose reader stopped renewing them, oldest first."""
        cursor = "0-0"
        while True:
            await self._free.acquire()
            entries: list[Any] = []
            try:
                async with state_errors():
                    cursor, entries, _ = await self._state.redis.xautoclaim(
                        self._store.stream, GROUP, self._consumer, int(min_idle_s * 1000), cursor, count=1
                    )
            finally:
                if not entries:
                    self._free.release()
            for entry, fields in entries:
                if JobId(fields["id"]) in self._tasks:
                    self._free.release()
                else:
                    self._start(entry, fields["id"])
            if cursor == "0-0":
                return

    def _start(self, entry: str, job_id: str) -> None:
        task = asyncio.create_task(self._attempt(entry, job_id), name=job_id)
        self._tasks[JobId(job_id)] = task
        task.add_done_callback(lambda done: self._done(JobId(job_id), done))

    def _done(self, job_id: JobId, task: asyncio.Task[None]) -> None:
        if self._tasks.get(job_id) is task:
            del self._tasks[job_id]
        self._over.discard(task)
        self._free.release()
        if not task.cancelled() and task.exception() is not None:
            log.error("job_task_failed", job_id=job_id, error=repr(task.exception()))

    def _ended(self, job_id: JobId | None) -> None:
        """Stop a run whose job was cancelled or expired, or that another worker took over."""
        task = self._tasks.get(job_id) if job_id is not None else None
        if task is not None and job_id not in self._ending:
            self._over.add(task)
            task.cancel()

    async def _attempt(self, entry: str, job_id: str) -> None:
        job = await self._store.begin(job_id, entry)
        if job is None:
            return
        log.info("job_started", job_id=job_id, model=job.model, attempt=job.attempt)
        lease = asyncio.create_task(self._keep_lease(job))
        started_at = time.monotonic()
        try:
            result = await self._run(job, lambda: self._mark_running(job))
            self._ending.add(job.job_id)
            await self._forever("result", lambda: self._store.succeed(job, result))
        except asyncio.CancelledError:
            if asyncio.current_task() not in self._over:  # the controller stops: let the next one run it at once
                with suppress(NearlineError):
                    await self._store.retry(job, Cancelled("the controller stopped"), 0.0, is_failure=False)
            raise
        except Exception as error:
            self._ending.add(job.job_id)
            await self._failed(job, error)
        finally:
            self._ending.discard(job.job_id)
            lease.cancel()
        log.info("job_attempt_ended", job_id=job_id, attempt=job.attempt, seconds=time.monotonic() - started_at)

    async def _mark_running(self, job: Job) -> None:
        """Say that the first token came. It only informs, so a store that cannot take it costs no run."""
        with suppress(StateUnavailable, StorageFull):
            await self._store.mark_running(job)

    async def _failed(self, job: Job, error: Exception) -> None:
        log.warning("job_attempt_failed", job_id=job.job_id, attempt=job.attempt, error=repr(error))
        found = verdict(error, job.attempt, BACKOFF_S)
        if isinstance(found, Expire):
            await self._forever("result", lambda: self._store.expire(job, error))
        elif isinstance(found, Fail):
            await self._forever("result", lambda: self._store.fail(job, error))
        else:
            await self._forever("result", lambda: self._store.retry(job, error, found.pause_s, found.is_failure))

    async def _keep_lease(self, job: Job) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            with suppress(StateUnavailable, StorageFull):
                if not await self._store.heartbeat(job, self._consumer):
                    self._ended(job.job_id)
                    return

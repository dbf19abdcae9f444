"""Asynchronous jobs as Redis keeps them: submitted once, ended once, found again after any crash."""

import asyncio
import hashlib
import json
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import structlog
from redis.exceptions import RedisError

from nearline.controller.durable import job_scripts as scripts
from nearline.controller.durable.redis_state import State, state_errors
from nearline.controller.shown import shown
from nearline.protocol import JobId, TenantId, from_plain, to_plain
from nearline.protocol.errors import (
    DeadlineExceeded,
    ErrorInfo,
    IdempotencyMismatch,
    InvalidRequest,
    JobNotFound,
    NearlineError,
    Overloaded,
)

log = structlog.get_logger(__name__)

GROUP = "workers"
MAX_QUEUED = 100_000
MAX_LOST = 20
"""Runs that may vanish with their controller before the job itself is suspected of killing it."""

MAX_RESULT_BYTES = 8 << 20
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.25, 4.0
_LISTED = (
    *("id", "tenant", "endpoint", "model", "state", "created_at", "deadline_at", "attempt", "max_attempts"),
    *("started_at", "completed_at", "error"),
)
"""Fields that a list reads: all but the body and the result, which may have megabytes."""


class JobState(StrEnum):
    """queued → starting → running → one of the four ends; back to queued for another attempt."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELED, JobState.EXPIRED)


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a tenant asks to be done later: `body` is sent to `endpoint` when its turn comes."""

    tenant: TenantId
    endpoint: str
    model: str
    body: dict[str, Any]
    deadline_s: float = 86_400.0
    max_attempts: int = 3
    idempotency_key: str | None = None

    @property
    def fingerprint(self) -> str:
        """Digest of everything that makes two submissions the same."""
        same = [self.endpoint, self.model, self.body, self.deadline_s, self.max_attempts]
        return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it stands. Instants are seconds since 1970 on Redis's clock; `attempt` counts runs so far.

    `left_s` is what a run that has just begun has until the deadline, by that clock. A listed job has neither body nor
    result.
    """

    job_id: JobId
    tenant: TenantId
    endpoint: str
    model: str
    body: dict[str, Any]
    state: JobState
    created_at: float
    deadline_at: float
    attempt: int
    max_attempts: int
    started_at: float | None = None
    completed_at: float | None = None
    result: dict[str, Any] | None = None
    error: ErrorInfo | None = None
    left_s: float | None = None


class JobStore:
    """All jobs of a deployment. Owns: the listener that tells of ended jobs."""

    def __init__(self, state: State, result_ttl_s: float = 86_400.0) -> None:
        self._state = state
        self._ttl_s = int(result_ttl_s)
        self._kept = f"{self._ttl_s} s" if self._ttl_s < 7200 else f"{self._ttl_s / 3600:.4g} hours"
        self._channel = state.key("jobs", "ended")
        self._prefix = state.key("job", "")
        self._listeners: list[Callable[[JobId | None], None]] = []
        self._ended: dict[JobId, list[asyncio.Event]] = {}
        self._has_news = False
        self.stream = state.key("jobs", "stream")

    def _keys(self, job_id: str) -> list[str]:
        fixed = (self._state.key("jobs", name) for name in ("delayed", "deadlines", "dead"))
        return [self._prefix + job_id, self.stream, *fixed]

    # ---- what tenants do ----

    async def submit(self, request: JobRequest) -> JobId:
        """Accept a job durably; the same idempotency key gives the same job.

        Raises IdempotencyMismatch when that key came with another body, Overloaded, StateUnavailable, StorageFull.
        """
        job_id = f"job_{uuid.uuid4().hex}"
        keys = [*self._keys(job_id), self._state.key("jobs", "of", request.tenant)]
        if request.idempotency_key:
            keys.append(self._state.key("jobs", "idempotency", request.tenant, request.idempotency_key))
        fields = {
            "tenant": request.tenant,
            "endpoint": request.endpoint,
            "model": request.model,
            "body": json.dumps(request.body),
            "max_attempts": request.max_attempts,
        }
        key_ttl_s = int(request.deadline_s) + self._ttl_s
        args: list[Any] = [job_id, request.fingerprint, key_ttl_s, MAX_QUEUED, request.deadline_s]
        args += [part for pair in fields.items() for part in pair]
        outcome, found = await self._state.run(scripts.SUBMIT, keys, args)
        await self._state.confirm()
        if outcome == "full":
            raise Overloaded(f"{MAX_QUEUED} jobs are queued; try again later", retry_after_s=30)
        if outcome == "mismatch":
            raise IdempotencyMismatch("this Idempotency-Key was used with another body; use a new key")
        return JobId(found)

    async def get(self, job_id: str, tenant: TenantId) -> Job:
        """Raises JobNotFound for an unknown, expired or other tenant's job."""
        job = await self._read(job_id)
        if job is None or job.tenant != tenant:
            raise JobNotFound(f"no job {shown(job_id)}; results are kept for {self._kept} after the end")
        return job

    async def cancel(self, job_id: str, tenant: TenantId) -> Job:
        """End a job wherever it is. Idempotent: a job that has ended stays as it is."""
        await self.get(job_id, tenant)
        await self.finish(job_id, None, JobState.CANCELED)
        return await self.get(job_id, tenant)

    async def list_jobs(self, tenant: TenantId, limit: int, after: str | None = None) -> list[Job]:
        """List a tenant's jobs, newest first, from behind the job `after`. Raises InvalidRequest for an unknown one."""
        key = self._state.key("jobs", "of", tenant)
        found: list[Job] = []
        async with state_errors():
            rank = await self._state.redis.zrevrank(key, after) if after else -1
            if rank is None:
                raise InvalidRequest(f"this list has no job {shown(after)} (any more); start at its top", param="after")
            start = int(rank)
            while len(found) < limit:
                ids = await self._state.redis.zrevrange(key, start + 1, start + limit)
                gone = [job_id for job_id in ids if not await self._append(found, job_id)]
                start += len(ids) - len(gone)
                if gone:
                    await self._state.redis.zrem(key, *gone)
                if not ids:
                    break
        return found[:limit]

    async def _append(self, found: list[Job], job_id: str) -> bool:
        values = await self._state.redis.hmget(self._prefix + job_id, list(_LISTED))
        fields = {name: value for name, value in zip(_LISTED, values, strict=True) if value is not None}
        if "id" in fields:
            found.append(_job(fields))
        return "id" in fields

    async def wait(self, job_id: str, tenant: TenantId, timeout_s: float) -> Job:
        """Wait until the job ends or the time is up; return it as it stands then."""
        event = asyncio.Event()
        waiters = self._ended.setdefault(JobId(job_id), [])
        waiters.append(event)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            job = await self.get(job_id, tenant)
            while not job.state.is_terminal and loop.time() < deadline:
                with suppress(TimeoutError):
                    # The slow re-check covers a message that was lost with its connection.
                    async with asyncio.timeout(min(5.0, deadline - loop.time())):
                        await event.wait()
                event.clear()
                job = await self.get(job_id, tenant)
            return job
        finally:
            waiters.remove(event)
            if not waiters:
                self._ended.pop(JobId(job_id), None)

    async def counts(self) -> dict[str, int]:
        """Number of waiting and running jobs, of jobs waiting for another attempt, and of dead letters."""
        async with state_errors():
            redis = self._state.redis
            dead, delayed = self._state.key("jobs", "dead"), self._state.key("jobs", "delayed")
            return {
                "active": int(await redis.xlen(self.stream)),
                "delayed": int(await redis.zcard(delayed)),
                "dead": int(await redis.xlen(dead)),
            }

    async def _read(self, job_id: str) -> Job | None:
        async with state_errors():
            fields = await self._state.redis.hgetall(self._prefix + job_id)
        return _job(fields) if fields else None

    # ---- what workers do ----

    async def begin(self, job_id: str, entry: str) -> Job | None:
        """Start the next attempt of a job read from the stream; None when there is nothing left to do."""
        lost = NearlineError(f"{MAX_LOST} runs ended with their controller; the job may be what kills it")
        late = DeadlineExceeded("the deadline passed before the job could run")
        args: list[Any] = [job_id, entry, MAX_LOST, self._ttl_s, self._channel, _error_text(lost), _error_text(late)]
        flat = await self._state.run(scripts.BEGIN, self._keys(job_id), args)
        return _job(dict(zip(flat[::2], flat[1::2], strict=True))) if flat else None

    async def mark_running(self, job: Job) -> None:
        await self._state.run(scripts.MARK_RUNNING, self._keys(job.job_id), [job.attempt])

    async def heartbeat(self, job: Job, consumer: str) -> bool:
        """Keep the lease of a run; False when the run must stop (cancelled, expired or taken over)."""
        return bool(await self._state.run(scripts.HEARTBEAT, self._keys(job.job_id), [job.attempt, consumer]))

    async def succeed(self, job: Job, result: dict[str, Any]) -> bool:
        """Write the result of this attempt. False when the job had ended or a newer attempt runs."""
        text = json.dumps(result)
        if len(text) > MAX_RESULT_BYTES:
            error = NearlineError(f"the result has {len(text)} bytes, more than the {MAX_RESULT_BYTES} kept for a job")
            return await self.finish(job.job_id, job.attempt, JobState.FAILED, "error", _error_text(error))
        return await self.finish(job.job_id, job.attempt, JobState.SUCCEEDED, "result", text)

    async def fail(self, job: Job, error: BaseException) -> bool:
        """End the job with this error, which no retry can help."""
        return await self.finish(job.job_id, job.attempt, JobState.FAILED, "error", _error_text(error))

    async def expire(self, job: Job, error: BaseException) -> bool:
        """End the job because its deadline passed while it ran."""
        return await self.finish(job.job_id, job.attempt, JobState.EXPIRED, "error", _error_text(error))

    async def retry(self, job: Job, error: BaseException, delay_s: float, is_failure: bool) -> bool:
        """Queue another attempt; after too many failures the job ends and becomes a dead letter."""
        args: list[Any] = [
            job.job_id,
            job.attempt,
            _error_text(error),
            delay_s,
            int(is_failure),
            self._ttl_s,
            self._channel,
        ]
        return bool(await self._state.run(scripts.RETRY, self._keys(job.job_id), args))

    async def finish(
        self, job_id: str, attempt: int | None, state: JobState, field: str = "error", value: str = ""
    ) -> bool:
        """Move a job to a terminal state, at most once in its life. `attempt` None: whichever runs."""
        newest = "" if attempt is None else attempt
        args: list[Any] = [job_id, newest, state.value, field, value, self._ttl_s, self._channel]
        return bool(await self._state.run(scripts.FINISH, self._keys(job_id), args))

    async def tick(self) -> int:
        """Queue delayed attempts that are due and expire jobs whose deadline passed."""
        late = DeadlineExceeded("the deadline passed before the job ended")
        args: list[Any] = [self._prefix, self._ttl_s, self._channel, _error_text(late)]
        return int(await self._state.run(scripts.TICK, self._keys(""), args))

    # ---- news ----

    def on_ended(self, listener: Callable[[JobId | None], None]) -> None:
        """Call `listener` with each job that ends, or with None when messages may have been missed."""
        self._listeners.append(listener)

    async def listen(self) -> None:
        """Receive news for ever, over outages. Run it as a task beside everything that waits."""
        pause_s = _MIN_PAUSE_S
        while True:
            self._has_news = False
            try:
                await self._receive()
            except (NearlineError, RedisError, OSError) as error:
                pause_s = _MIN_PAUSE_S if self._has_news else min(pause_s * 2, _MAX_PAUSE_S)
                log.warning("job_news_interrupted", error=str(error), pause_s=pause_s)
                await asyncio.sleep(pause_s)

    async def _receive(self) -> None:
        async with self._state.redis.pubsub(ignore_subscribe_messages=True) as pubsub:
            async with state_errors():
                await pubsub.subscribe(self._channel)
            self._has_news = True
            self._tell(None)
            while True:
                async with state_errors():
                    message = await pubsub.get_message(timeout=5.0)
                if message is not None:
                    self._tell(JobId(message["data"]))

    def _tell(self, job_id: JobId | None) -> None:
        waiters = self._ended.values() if job_id is None else [self._ended.get(job_id, [])]
        for event in [event for events in waiters for event in events]:
            event.set()
        for listener in self._listeners:
            listener(job_id)


def _error_text(error: BaseException) -> str:
    return json.dumps(to_plain(ErrorInfo.of(error)))


def _job(fields: dict[str, str]) -> Job:
    started, completed = fields.get("started_at"), fields.get("completed_at")
    return Job(
        job_id=JobId(fields["id"]),
        tenant=TenantId(fields["tenant"]),
        endpoint=fields["endpoint"],
        model=fields["model"],
        body=json.loads(fields.get("body", "{}")),
        state=JobState(fields["state"]),
        created_at=float(fields["created_at"]),
        deadline_at=float(fields["deadline_at"]),
        attempt=int(fields["attempt"]),
        max_attempts=int(fields["max_attempts"]),
        started_at=float(started) if started else None,
        completed_at=float(completed) if completed else None,
        result=json.loads(fields["result"]) if "result" in fields else None,
        error=from_plain(ErrorInfo, json.loads(fields["error"])) if "error" in fields else None,
        left_s=float(fields["left_s"]) if "left_s" in fields else None,
    )

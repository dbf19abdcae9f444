"""Jobs against a real Valkey: every one accepted ends exactly once, whoever dies."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from nearline.controller.durable import job_worker
from nearline.controller.durable.job_worker import JobWorker
from nearline.controller.durable.jobs import GROUP, Job, JobRequest, JobState, JobStore
from nearline.controller.durable.redis_state import State
from nearline.protocol import JobId, TenantId
from nearline.protocol.errors import (
    DeadlineExceeded,
    IdempotencyMismatch,
    InstanceFailed,
    InvalidRequest,
    JobNotFound,
    Overloaded,
    StateUnavailable,
    StorageFull,
)
from tests.controller.conftest import Valkey

ANN = TenantId("ann")
WAIT_S = 60.0
Started = Callable[[], Awaitable[None]]


def request(**other: Any) -> JobRequest:
    fields: dict[str, Any] = {"tenant": ANN, "endpoint": "function", "model": "m", "body": {"prompt": "hi"}}
    return JobRequest(**(fields | other))


class Endless:
    """A run that ends only when it is stopped."""

    def __init__(self) -> None:
        self.begun, self.stopped = asyncio.Event(), asyncio.Event()

    async def __call__(self, job: Job, started: Started) -> dict[str, Any]:
        self.begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            self.stopped.set()
        return {}


class Bench:
    """Some workers over one store, that can be killed the hard way: their tasks vanish, nothing is handed back."""

    def __init__(self, state: State, run: Any, lease_s: float = 0.6) -> None:
        self.state = state
        self.store = JobStore(state)
        self._run = run
        self._lease_s = lease_s
        self._num_workers = 0
        self.tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self.store.listen())]

    def hire(self, **options: Any) -> JobWorker:
        self._num_workers += 1
        name = f"w{self._num_workers}"
        worker = JobWorker(self.state, self.store, self._run, name, lease_s=self._lease_s, is_heir=False, **options)
        self.tasks.append(asyncio.create_task(worker.serve(), name=name))
        return worker

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def bench(state: State) -> AsyncIterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(run: Any, **options: Any) -> Bench:
        made.append(Bench(state, run, **options))
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_worker, "BACKOFF_S", (0.02, 0.1))


async def answer(job: Job, started: Started) -> dict[str, Any]:
    await started()
    return {"output": {"text": job.body["prompt"]}}


async def test_a_run_hears_from_redis_how_much_time_it_has(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[float | None] = []

    async def listen(job: Job, started: Started) -> dict[str, Any]:
        heard.append(job.left_s)
        return {}

    monkeypatch.setattr(time, "time", lambda: 0.0)  # this machine's clock is far off
    b = bench(listen)
    job_id = await b.store.submit(request(deadline_s=50.0))
    b.hire()
    assert (await b.store.wait(job_id, ANN, WAIT_S)).state is JobState.SUCCEEDED
    assert heard[0] is not None
    assert 45 < heard[0] <= 50


async def test_a_tenants_list_forgets_what_expired_without_being_looked_at(state: State) -> None:
    store = JobStore(state)
    key, prefix = state.key("jobs", "of", ANN), state.key("job", "")
    for _ in range(300):
        job_id = await store.submit(request())
        await state.redis.delete(prefix + job_id)
    assert int(await state.redis.zcard(key)) < 60, "of 300 entries that name nothing"
    kept = await store.submit(request())
    assert [job.job_id for job in await store.list_jobs(ANN, 100)] == [kept]
    assert int(await state.redis.ttl(key)) > 86_000


async def test_a_list_reads_neither_bodies_nor_results_and_knows_its_places(bench: Callable[..., Bench]) -> None:
    b = bench(answer)
    job_id = await b.store.submit(request())
    b.hire()
    await b.store.wait(job_id, ANN, WAIT_S)
    (listed,) = await b.store.list_jobs(ANN, 10)
    assert (listed.job_id, listed.state, listed.body, listed.result) == (job_id, JobState.SUCCEEDED, {}, None)
    assert await b.store.list_jobs(ANN, 10, after=job_id) == []
    with pytest.raises(InvalidRequest, match="job_none"):
        await b.store.list_jobs(ANN, 10, after="job_none")


async def test_a_job_is_submitted_run_and_found(bench: Callable[..., Bench]) -> None:
    b = bench(answer)
    job_id = await b.store.submit(request())
    assert (await b.store.get(job_id, ANN)).state is JobState.QUEUED
    b.hire()
    job = await b.store.wait(job_id, ANN, WAIT_S)
    assert (job.state, job.result, job.attempt) == (JobState.SUCCEEDED, {"output": {"text": "hi"}}, 1)
    assert await b.store.counts() == {"active": 0, "delayed": 0, "dead": 0}
    pending = await b.state.redis.xpending(b.store.stream, GROUP)
    assert pending["pending"] == 0


async def test_one_idempotency_key_is_one_job_however_often_it_is_sent(bench: Callable[..., Bench]) -> None:
    b = bench(answer)
    ids = await asyncio.gather(*[b.store.submit(request(idempotency_key="k")) for _ in range(20)])
    assert len(set(ids)) == 1
    other = await b.store.submit(request(idempotency_key="k", tenant=TenantId("bob")))
    assert other != ids[0]
    with pytest.raises(IdempotencyMismatch):
        await b.store.submit(request(idempotency_key="k", body={"prompt": "ho"}))


async def test_a_job_much_longer_than_its_lease_runs_once(bench: Callable[..., Bench]) -> None:
    runs: list[JobId] = []

    async def slow(job: Job, started: Started) -> dict[str, Any]:
        runs.append(job.job_id)
        await asyncio.sleep(5.0)
        return {}

    b = bench(slow, lease_s=2.0)
    b.hire()
    b.hire()
    job_id = await b.store.submit(request())
    assert (await b.store.wait(job_id, ANN, WAIT_S)).state is JobState.SUCCEEDED
    assert runs == [job_id]


async def test_a_vanished_worker_leaves_its_jobs_to_the_next(bench: Callable[..., Bench], state: State) -> None:
    b = bench(answer)
    job_id = await b.store.submit(request())
    dead = JobWorker(state, b.store, answer, "dead")
    await dead._ensure_group()
    await state.redis.xreadgroup(GROUP, "dead", {b.store.stream: ">"}, 1)
    b.hire()
    assert (await b.store.wait(job_id, ANN, WAIT_S)).state is JobState.SUCCEEDED


async def test_a_run_that_was_taken_over_cannot_write_its_result(bench: Callable[..., Bench], state: State) -> None:
    b = bench(answer)
    job_id = await b.store.submit(request())
    await JobWorker(state, b.store, answer, "w")._ensure_group()
    ((_, ((entry, _),)),) = await state.redis.xreadgroup(GROUP, "w", {b.store.stream: ">"}, 1)
    first = await b.store.begin(job_id, entry)
    second = await b.store.begin(job_id, entry)
    assert first is not None
    assert second is not None
    assert (first.attempt, second.attempt) == (1, 2)
    assert not await b.store.heartbeat(first, "w")
    assert not await b.store.succeed(first, {"by": 1})
    assert await b.store.succeed(second, {"by": 2})
    assert not await b.store.fail(second, InvalidRequest("late"))
    assert (await b.store.get(job_id, ANN)).result == {"by": 2}


async def test_every_job_ends_exactly_once_while_workers_die_at_random(bench: Callable[..., Bench]) -> None:
    chance = random.Random(7)
    ended: Counter[str] = Counter()

    async def work(job: Job, started: Started) -> dict[str, Any]:
        await asyncio.sleep(chance.random() * 0.05)
        if chance.random() < 0.1:
            raise InstanceFailed("bad luck")
        return {"attempt": job.attempt}

    b = bench(work, lease_s=0.6)
    b.store.on_ended(lambda job_id: ended.update([str(job_id)] if job_id else []))
    ids = [await b.store.submit(request(max_attempts=50, body={"prompt": str(i)})) for i in range(200)]
    for _ in range(4):
        b.hire(max_running=8)
    for _ in range(6):
        await asyncio.sleep(0.15)
        killed = b.hire(max_running=8)
        await asyncio.sleep(0.1)
        for task in killed._tasks.values():  # like kill -9: its leases are kept by nobody
            task.cancel()
            killed._over.add(task)
    jobs = await asyncio.gather(*[b.store.wait(job_id, ANN, WAIT_S) for job_id in ids])
    assert {job.state for job in jobs} == {JobState.SUCCEEDED}
    assert all(job.result == {"attempt": job.attempt} for job in jobs)
    assert set(ended.values()) == {1}
    pending = await b.state.redis.xpending(b.store.stream, GROUP)
    assert pending["pending"] == 0


async def test_a_poison_job_becomes_a_dead_letter_with_its_last_error(bench: Callable[..., Bench]) -> None:
    async def poison(job: Job, started: Started) -> dict[str, Any]:
        raise InstanceFailed(f"died of attempt {job.attempt}")

    b = bench(poison)
    b.hire()
    job_id = await b.store.submit(request(max_attempts=3))
    job = await b.store.wait(job_id, ANN, WAIT_S)
    assert (job.state, job.attempt) == (JobState.FAILED, 3)
    assert job.error is not None
    assert (job.error.code, job.error.message) == ("instance_failed", "died of attempt 3")
    ((_, letter),) = await b.state.redis.xrange(b.state.key("jobs", "dead"))
    assert letter["id"] == job_id
    assert await b.store.counts() == {"active": 0, "delayed": 0, "dead": 1}


async def test_an_error_no_retry_can_help_ends_the_job_at_once(bench: Callable[..., Bench]) -> None:
    async def wrong(job: Job, started: Started) -> dict[str, Any]:
        raise InvalidRequest("this cannot be")

    b = bench(wrong)
    b.hire()
    job = await b.store.wait(await b.store.submit(request()), ANN, WAIT_S)
    assert (job.state, job.attempt) == (JobState.FAILED, 1)


async def test_being_refused_for_load_is_no_failure_of_the_job(bench: Callable[..., Bench]) -> None:
    async def busy(job: Job, started: Started) -> dict[str, Any]:
        if job.attempt < 6:
            raise Overloaded("not now", retry_after_s=0.01)
        return {}

    b = bench(busy)
    b.hire()
    job = await b.store.wait(await b.store.submit(request(max_attempts=2)), ANN, WAIT_S)
    assert (job.state, job.attempt) == (JobState.SUCCEEDED, 6)


async def test_a_deadline_ends_a_job_in_the_queue_and_in_its_run(bench: Callable[..., Bench]) -> None:
    endless = Endless()
    b = bench(endless)
    b.hire(max_running=1)
    running = await b.store.submit(request(deadline_s=5.0))
    await endless.begun.wait()
    queued = await b.store.submit(request(deadline_s=0.2))
    job = await b.store.wait(queued, ANN, WAIT_S)
    assert (job.state, job.attempt) == (JobState.EXPIRED, 0)
    job = await b.store.wait(running, ANN, WAIT_S)
    assert (job.state, job.attempt) == (JobState.EXPIRED, 1)
    async with asyncio.timeout(WAIT_S):
        await endless.stopped.wait()


async def test_a_run_that_hears_of_its_deadline_first_expires_the_job(bench: Callable[..., Bench]) -> None:
    async def late(job: Job, started: Started) -> dict[str, Any]:
        raise DeadlineExceeded("too late")

    b = bench(late)
    b.hire()
    assert (await b.store.wait(await b.store.submit(request()), ANN, WAIT_S)).state is JobState.EXPIRED


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_cancelled_job_stays_cancelled(bench: Callable[..., Bench], is_running: bool) -> None:
    endless = Endless()
    b = bench(endless)
    job_id = await b.store.submit(request())
    if is_running:
        b.hire()
        await endless.begun.wait()
    assert (await b.store.cancel(job_id, ANN)).state is JobState.CANCELED
    if is_running:
        async with asyncio.timeout(WAIT_S):
            await endless.stopped.wait()
    else:
        b.hire()
        await asyncio.sleep(0.2)
        assert not endless.begun.is_set()
    assert (await b.store.cancel(job_id, ANN)).state is JobState.CANCELED


async def test_a_stopping_worker_hands_its_jobs_back(bench: Callable[..., Bench]) -> None:
    begun = asyncio.Event()

    async def once(job: Job, started: Started) -> dict[str, Any]:
        if job.attempt == 1:
            begun.set()
            await asyncio.sleep(60)
        return {}

    b = bench(once, lease_s=30)
    b.hire()
    job_id = await b.store.submit(request(max_attempts=1))
    await begun.wait()
    b.tasks[-1].cancel()
    b.hire()
    assert (await b.store.wait(job_id, ANN, WAIT_S)).state is JobState.SUCCEEDED


async def test_other_tenants_and_unknown_ids_find_nothing(bench: Callable[..., Bench]) -> None:
    b = bench(answer)
    job_id = await b.store.submit(request())
    for tenant, wanted in ((TenantId("bob"), job_id), (ANN, "job_x")):
        with pytest.raises(JobNotFound, match="kept for 24 hours"):
            await b.store.get(wanted, tenant)


async def test_an_outage_interrupts_and_loses_nothing(own_valkey: Valkey) -> None:
    state = State(own_valkey.url)
    release = asyncio.Event()

    async def held(job: Job, started: Started) -> dict[str, Any]:
        await release.wait()
        return {}

    b = Bench(state, held)
    try:
        b.hire()
        running = await b.store.submit(request())
        while not (await b.store.get(running, ANN)).attempt:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.to_thread(own_valkey.stop)
        with pytest.raises(StateUnavailable):
            await b.store.submit(request())
        release.set()
        await asyncio.sleep(0.5)
        await asyncio.to_thread(own_valkey.start)
        assert (await b.store.wait(running, ANN, WAIT_S)).state is JobState.SUCCEEDED
        after = await b.store.submit(request())
        assert (await b.store.wait(after, ANN, WAIT_S)).state is JobState.SUCCEEDED
    finally:
        await b.close()
        await state.close()


async def test_a_store_that_is_full_at_the_first_token_costs_no_attempt(own_valkey: Valkey) -> None:
    state = State(own_valkey.url)

    async def full(job: Job, started: Started) -> dict[str, Any]:
        await state.redis.config_set("maxmemory", 1)
        try:
            with pytest.raises(StorageFull):
                await b.store.mark_running(job)
            await started()
        finally:
            await state.redis.config_set("maxmemory", 0)
        return {}

    b = Bench(state, full)
    try:
        b.hire()
        job = await b.store.wait(await b.store.submit(request()), ANN, WAIT_S)
        assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1)
    finally:
        await b.close()
        await state.close()

"""A state store whose memory is full: what needs no writes goes on, what does is refused with the cure, all by itself
goes on when there is room."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from nearline.controller.durable.lease import LeaderLease
from nearline.controller.durable.limits import Limits
from nearline.controller.durable.redis_state import State
from tests.controller.conftest import Valkey
from tests.controller.http.conftest import checkpoint, serve

PATH = "/v1/functions/tiny/invocations"
MODEL = {"name": "second", "source": "/models/second"}


@pytest.fixture
async def state(own_valkey: Valkey, prefix: str) -> AsyncIterator[State]:
    """A server of the test's own, whose memory it may take away."""
    connected = State(own_valkey.url, prefix)
    yield connected
    await connected.close()


async def fill(state: State) -> None:
    """Allow less memory than an empty server takes."""
    await state.redis.config_set("maxmemory", "1kb")


async def make_room(state: State) -> None:
    await state.redis.config_set("maxmemory", "0")


async def test_invocations_go_on_and_what_must_be_kept_is_refused_until_there_is_room(make_door: Any) -> None:
    door, runtime = await make_door(limits=Limits.of(["default=100:10:100000"]))
    runtime.imports[MODEL["source"]] = checkpoint("d2")
    async for front in serve(door, runtime):
        _, before, _ = await front.post(PATH, {"prompt": "Hi"}, Invocation_Type="Event")
        await front.get(f"/v1/jobs/{before['id']}", Prefer="wait=60")
        await fill(door.state)
        status, answer, _ = await front.post(PATH, {"prompt": "Hi", "max_tokens": 4})
        assert (status, answer["usage"]["completion_tokens"] > 0) == (200, True), "a limited tenant is served"
        for path, body, kind in (("/admin/models", MODEL, "RequestResponse"), (PATH, {"prompt": "Hi"}, "Event")):
            status, answer, _ = await front.post(path, body, Invocation_Type=kind)
            assert (status, answer["error"]["code"]) == (507, "storage_full")
            assert "raise its maxmemory" in answer["error"]["message"]
        assert (await front.get(f"/v1/jobs/{before['id']}"))[1]["status"] == "succeeded"
        assert "second" not in str((await front.get("/v1/models"))[1])

        await make_room(door.state)
        assert (await front.post("/admin/models", MODEL))[0] in (200, 201)
        status, job, _ = await front.post(PATH, {"prompt": "Hi"}, Invocation_Type="Event")
        assert status == 202
        assert (await front.get(f"/v1/jobs/{job['id']}", Prefer="wait=60"))[1]["status"] == "succeeded"


async def test_a_model_is_removed_though_memory_is_full(make_door: Any) -> None:
    door, runtime = await make_door()
    async for front in serve(door, runtime):
        await fill(door.state)
        async with front.session.delete(f"{front.url}/admin/models/org/tiny:v1") as response:
            assert response.status == 200


async def test_a_leader_keeps_its_lease_though_memory_is_full(state: State) -> None:
    lease = LeaderLease(state, ttl_s=60.0)
    await lease.acquire()
    await state.redis.pexpire(state.key("leader"), 30_000)
    await fill(state)
    assert await lease._renew()
    assert await state.redis.pttl(state.key("leader")) > 31_000

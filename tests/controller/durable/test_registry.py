"""Names, specs and the leader lease, on a real Valkey."""

import asyncio
import sys
from subprocess import DEVNULL, PIPE

import pytest

from nearline.controller.durable.lease import LeaderLease
from nearline.controller.durable.redis_state import State
from nearline.controller.durable.registry import Registry, check_name
from nearline.protocol import AdapterSpec, CheckpointInfo, CheckpointKind, Digest, ModelId, ModelSpec
from nearline.protocol.errors import InvalidRequest, ModelNotFound, NameTaken, StateUnavailable
from tests.controller.conftest import Valkey


def checkpoint(digest: str) -> CheckpointInfo:
    return CheckpointInfo(Digest(digest), CheckpointKind.MODEL, 10, "llama", "L", "/m", "float32", ("a.json",))


def model(name: str, digest: str = "d") -> ModelSpec:
    return ModelSpec(ModelId(name), checkpoint(digest), 1.5, keep_alive_s=-1)


def adapter(name: str, base: str) -> AdapterSpec:
    return AdapterSpec(ModelId(name), ModelId(base), checkpoint("a"), 2.5)


async def leading(state: State) -> Registry:
    return Registry(state, await LeaderLease(state).acquire())


async def test_what_is_registered_is_there_after_a_restart(state: State) -> None:
    registry = await leading(state)
    await registry.put_model(model("org/m"))
    await registry.put_model(model("gone"))
    await registry.put_adapter(adapter("ad", "org/m"))
    await registry.remove_model(ModelId("gone"))
    again = Registry(state, 0)
    await again.load()
    assert again.models == {"org/m": model("org/m")}
    assert again.adapters == {"ad": adapter("ad", "org/m")}


async def test_names_mean_models_then_adapters_then_base_and_adapter(state: State) -> None:
    registry = await leading(state)
    await registry.put_model(model("llama:7b"))
    await registry.put_model(model("other"))
    await registry.put_adapter(adapter("x:y", "llama:7b"))
    for name, adapter_id in (("llama:7b", None), ("x:y", "x:y"), ("llama:7b:x:y", "x:y")):
        target = registry.resolve(name)
        assert (target.model.model_id, target.adapter and target.adapter.adapter_id) == ("llama:7b", adapter_id)
    for name in ("other:x:y", "llama", "7b", "y", "llama:7b:", ""):
        with pytest.raises(ModelNotFound):
            registry.resolve(name)
    with pytest.raises(NameTaken, match=r"take its place \(`replace`\)"):
        registry.check_free("x:y")


async def test_no_new_name_changes_what_another_name_means(state: State) -> None:
    registry = await leading(state)
    await registry.put_model(model("m"))
    await registry.put_adapter(adapter("a", "m"))
    with pytest.raises(NameTaken, match="means adapter 'a' on 'm' already"):
        registry.check_free("m:a")
    await registry.put_model(model("m:b"))
    with pytest.raises(NameTaken, match="'m:b' is registered already"):
        registry.check_free("b", ModelId("m"))
    registry.check_free("b", ModelId("m:b"))
    registry.check_free("m:c")


@pytest.mark.parametrize("name", ["a", "org/model-7b:v1.2", "模型/名", "a_b@c+d=e"])
def test_sensible_names_are_accepted(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "..", "a/../b", "a..b", "a b", "-a", "a\n", "x" * 201, "a\\b"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check_name(name)


async def test_a_controller_that_lost_the_lease_cannot_write(state: State) -> None:
    old = await leading(state)
    await state.redis.delete(state.key("leader"))
    new = await leading(state)
    with pytest.raises(StateUnavailable):
        await old.put_model(model("m"))
    assert "m" not in old.models
    await new.put_model(model("m"))


async def test_without_redis_reads_go_on_and_writes_say_so(own_valkey: Valkey) -> None:
    state = State(own_valkey.url)
    registry = await leading(state)
    await registry.put_model(model("m"))
    await asyncio.to_thread(own_valkey.stop)
    assert registry.resolve("m").model == model("m")
    with pytest.raises(StateUnavailable) as failed:
        await registry.put_model(model("n"))
    assert failed.value.retry_after_s
    assert "n" not in registry.models
    await asyncio.to_thread(own_valkey.start)
    await registry.put_model(model("n"))
    await state.close()


async def test_a_second_controller_stands_by_until_the_first_lets_go(state: State) -> None:
    first, second = LeaderLease(state, 3.0), LeaderLease(state, 3.0)
    token = await first.acquire()
    keeping = asyncio.create_task(first.keep(lambda: None))
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(4.5)
    assert not waiting.done()
    keeping.cancel()
    await first.release()
    async with asyncio.timeout(60):
        assert await waiting == token + 1


async def test_a_lease_nobody_renews_runs_out_and_its_owner_hears_of_it(state: State) -> None:
    first, second = LeaderLease(state, 0.3), LeaderLease(state, 5)
    await first.acquire()
    async with asyncio.timeout(60):
        await second.acquire()
    lost = asyncio.Event()
    async with asyncio.timeout(60):
        await first.keep(lost.set)
    assert lost.is_set()
    assert (first.token, second.token) == (0, 2)


async def test_a_lease_that_lapsed_unseen_is_kept(state: State) -> None:
    lease = LeaderLease(state, 0.3)
    await lease.acquire()
    await state.redis.delete(state.key("leader"))
    assert await lease._renew()


async def test_the_lease_of_a_killed_process_is_taken_at_once(state: State, valkey: Valkey) -> None:
    code = (
        "import asyncio, sys, time\n"
        "from nearline.controller.durable.lease import LeaderLease\n"
        "from nearline.controller.durable.redis_state import State\n"
        "print(asyncio.run(LeaderLease(State(sys.argv[1], sys.argv[2]), 60).acquire()), flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, valkey.url, state.prefix]
    owner = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    try:
        assert owner.stdout is not None
        await owner.stdout.readline()
        successor = asyncio.create_task(LeaderLease(state, 1.0).acquire())
        await asyncio.sleep(0.5)
        assert not successor.done()
        owner.kill()
        async with asyncio.timeout(60):
            assert await successor == 2
    finally:
        await owner.wait()

"""The runtime in the test's own process: what breaks while it acts fails an instance or a process, never the agent."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from nearline.checkpoint_store import CheckpointStore, StoreConfig
from nearline.node_agent import actions as act
from nearline.node_agent import events as ev
from nearline.node_agent.config import Device, Hardware, NodeConfig
from nearline.node_agent.runtime import NodeIdentity, NodeRuntime
from nearline.node_agent.types import EngineId
from nearline.node_agent.watched import watched
from nearline.protocol import CheckpointInfo, InstanceId, InstanceSpec, InstanceState, ModelId, NodeId
from nearline.protocol.frames import Bind, Bound, EnsureInstance, ExtentsFree, StepDone

ID = InstanceId("i1")


class Bench:
    """A runtime whose processes are only noted, and its owner task."""

    def __init__(self, data_dir: Path) -> None:
        config = NodeConfig(
            controller_url="http://127.0.0.1:9", data_dir=data_dir, num_slots=1, num_prewarmed=1, kv_bytes=1 << 24
        )
        store_config = StoreConfig(root=data_dir / "store", dram_pool_bytes=1 << 25, touch_ahead_bytes=0)
        self.store = CheckpointStore(store_config)
        hardware = Hardware(2, 1 << 34, (Device("cpu", "cpu", 1 << 34),))
        self.runtime = NodeRuntime(config, hardware, self.store, NodeIdentity(NodeId("n"), "127.0.0.1", 1))
        self.core = self.runtime._core
        self.started: list[EngineId] = []
        self.sent: list[Any] = []
        self.handle(act.StartEngine, lambda action: self.started.append(action.engine_id))
        self.runtime._supervisor.send = lambda _, message: self.sent.append(message)  # type: ignore[method-assign]
        self.owner = asyncio.create_task(self.runtime._own())
        self.post(ev.Woke())

    def handle(self, kind: type, handler: Any) -> None:
        self.runtime._action_handlers[kind] = handler

    def post(self, item: Any) -> None:
        self.runtime._inbox.put_nowait(item)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():
                assert not self.owner.done(), "the agent ended"
                await asyncio.sleep(0.01)


@pytest.fixture
async def bench(data_dir: Path) -> AsyncIterator[Bench]:
    made = Bench(data_dir)
    await made.until(lambda: made.started)
    yield made
    made.owner.cancel()
    await asyncio.gather(made.owner, return_exceptions=True)
    made.runtime._leases.close()
    made.store.close()


async def test_a_delete_that_races_a_start_waits_for_its_lease(
    bench: Bench, stored_checkpoint: tuple[CheckpointInfo, Path]
) -> None:
    digest = stored_checkpoint[0].digest
    directory = bench.store.directory(digest)
    bench.post(EnsureInstance(InstanceSpec(ID, ModelId("m"), digest)))
    await bench.until(lambda: bench.core.state(ID) is InstanceState.STARTING)
    await bench.until(lambda: bench.runtime._leases._held.get(ID) is not None)
    bench.store.delete(digest)
    bench.post(ev.EngineWarm(bench.started[0]))
    await bench.until(lambda: bench.core.state(ID) is InstanceState.LOADING)
    await bench.until(lambda: bench.sent)
    (bind,) = bench.sent
    assert isinstance(bind, Bind)
    assert Path(bind.manifest_path).is_relative_to(directory)
    assert Path(bind.manifest_path).exists()


@pytest.mark.parametrize("kind", [act.AcquireCheckpoint, act.BindEngine])
async def test_what_breaks_while_the_agent_acts_fails_that_instance(
    bench: Bench, kind: type, stored_checkpoint: tuple[CheckpointInfo, Path]
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("the store stumbled")

    bench.handle(kind, fail)
    bench.post(ev.EngineWarm(bench.started[0]))
    bench.post(EnsureInstance(InstanceSpec(ID, ModelId("m"), stored_checkpoint[0].digest)))
    await bench.until(lambda: bench.core.state(ID) is InstanceState.FAILED)
    error = bench.core._roster.instances[ID].error
    assert error is not None
    assert (error.code, "the store stumbled" in error.message) == ("instance_failed", True)
    bench.core.check()


async def test_what_breaks_over_a_frame_is_logged_and_no_process_ends_of_it_but_one_whose_tokens_are_lost(
    bench: Bench, stored_checkpoint: tuple[CheckpointInfo, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_id = bench.started[0]
    bench.post(ev.EngineWarm(engine_id))
    bench.post(EnsureInstance(InstanceSpec(ID, ModelId("m"), stored_checkpoint[0].digest)))
    await bench.until(lambda: bench.sent)

    def fail(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(bench.runtime._adapter_leases, "free", fail)
    monkeypatch.setattr(bench.runtime._relay, "step_done", fail)
    with capture_logs() as logs:
        bench.runtime._on_frame(engine_id, ExtentsFree(1))
        bench.runtime._on_frame(engine_id, Bound(ID, 0.1, 100))
        await bench.until(lambda: bench.core.state(ID) is InstanceState.READY)
        bench.runtime._on_frame(engine_id, StepDone((), 0, 0, 0))
        await bench.until(lambda: bench.core.state(ID) is InstanceState.FAILED)
    assert [line["what"] for line in logs if line["log_level"] == "error"] == ["ExtentsFree", "StepDone"]


async def test_a_task_that_fails_is_logged_though_nobody_waits_for_it() -> None:
    async def fail() -> None:
        raise RuntimeError("a defect")

    with capture_logs() as logs:
        await asyncio.gather(watched(fail(), "an errand"), return_exceptions=True)
    assert [(line["task"], str(line["exc_info"])) for line in logs] == [("an errand", "a defect")]


async def test_a_process_that_cannot_be_started_is_started_again_later(bench: Bench) -> None:
    def fail(action: act.StartEngine) -> None:
        bench.started.append(action.engine_id)
        raise OSError("no more processes")

    bench.handle(act.StartEngine, fail)
    bench.post(ev.EngineExited(bench.started[0], "exit code 1"))
    await bench.until(lambda: len(bench.started) > 2)
    assert not bench.owner.done()

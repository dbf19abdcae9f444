"""The runtime in the test's own process: what breaks while it acts fails an instance or a process, never the agent."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from nearline.checkpoint_store import CheckpointStore, StoreConfig
from nearline.node_agent import runtime as runtime_module
from nearline.node_agent.config import Device, Hardware, NodeConfig
from nearline.node_agent.leases import Leases
from nearline.node_agent.runtime import NodeIdentity, NodeRuntime
from nearline.node_agent.types import EngineId
from nearline.protocol import CheckpointInfo, InstanceId, InstanceState, NodeId
from nearline.protocol.frames import Bind, EngineReady
from tests.node_agent.conftest import TOKEN, FakeController

ID = InstanceId("i1")


class NotedProcesses:
    """Stands in for the Supervisor: its processes are only noted, and speak when a test lets them."""

    def __init__(
        self, launches: object, on_frame: Callable[[EngineId, object], None], on_exit: Callable[[EngineId, str], None]
    ) -> None:
        self.frame, self.exit = on_frame, on_exit
        self.started: list[EngineId] = []
        self.sent: list[object] = []
        self.fault: Exception | None = None

    def start(self, engine_id: EngineId, device_index: int) -> None:
        self.started.append(engine_id)
        if self.fault is not None:
            raise self.fault

    def send(self, engine_id: EngineId, message: object) -> None:
        if self.fault is not None and isinstance(message, Bind):
            raise self.fault
        self.sent.append(message)

    def kill(self, engine_id: EngineId) -> None:
        self.exit(engine_id, "killed")

    def kill_hung(self, engine_id: EngineId, cause: str) -> None: ...

    async def close(self) -> None: ...


class Bench:
    """A running agent without processes, and the controller it talks to."""

    def __init__(self, store: CheckpointStore, controller: FakeController, processes: NotedProcesses) -> None:
        self.store, self.controller, self.processes = store, controller, processes
        self.running: asyncio.Task[None] | None = None

    def warm(self, index: int = 0) -> None:
        """A process says that it is up."""
        self.processes.frame(self.processes.started[index], EngineReady(1, "cpu", 0.1))

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                assert self.running is not None
                assert not self.running.done(), "the agent ended"
                await asyncio.sleep(0.01)


@pytest.fixture
async def bench(data_dir: Path, controller: FakeController, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    made: list[NotedProcesses] = []

    def noted(*arguments: Any) -> NotedProcesses:
        made.append(NotedProcesses(*arguments))
        return made[0]

    monkeypatch.setattr(runtime_module, "Supervisor", noted)
    url = f"http://127.0.0.1:{controller.port}"
    config = NodeConfig(
        controller_url=url, token=TOKEN, data_dir=data_dir, num_slots=1, num_prewarmed=1, kv_bytes=1 << 24
    )
    store = CheckpointStore(StoreConfig(root=data_dir / "store", dram_pool_bytes=1 << 25, touch_ahead_bytes=0))
    hardware = Hardware(2, 1 << 34, (Device("cpu", "cpu", 1 << 34),))
    agent = NodeRuntime(config, hardware, store, NodeIdentity(NodeId("n"), "127.0.0.1", 1))
    bench = Bench(store, controller, made[0])
    bench.running = asyncio.create_task(agent.run())
    await bench.until(lambda: bench.processes.started and controller.num_links)
    yield bench
    bench.running.cancel()
    await asyncio.gather(bench.running, return_exceptions=True)
    store.close()


async def test_a_delete_that_races_a_start_waits_for_its_lease(
    bench: Bench, stored_checkpoint: tuple[CheckpointInfo, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, leased = stored_checkpoint[0].digest, list[object]()
    directory, lease = bench.store.directory(digest), bench.store.acquire

    def noted(*arguments: Any, **settings: Any) -> Any:
        made = lease(*arguments, **settings)
        leased.append(made)
        return made

    monkeypatch.setattr(bench.store, "acquire", noted)
    await bench.controller.ensure(ID, digest)
    await bench.controller.state(ID, "starting")
    await bench.until(lambda: leased)
    bench.store.delete(digest)
    bench.warm()
    await bench.controller.state(ID, "loading")
    await bench.until(lambda: any(isinstance(message, Bind) for message in bench.processes.sent))
    (bind,) = [message for message in bench.processes.sent if isinstance(message, Bind)]
    assert Path(bind.manifest_path).is_relative_to(directory)
    assert Path(bind.manifest_path).exists()


@pytest.mark.parametrize("breaks", ["leases", "processes"])
async def test_what_breaks_while_the_agent_acts_fails_that_instance(
    bench: Bench, breaks: str, stored_checkpoint: tuple[CheckpointInfo, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint cannot be had, or its engine cannot be told."""
    bench.warm()
    if breaks == "processes":
        bench.processes.fault = RuntimeError("the node stumbled")
    else:

        def fail(*_: Any) -> None:
            raise RuntimeError("the node stumbled")

        monkeypatch.setattr(Leases, "acquire", fail)
    await bench.controller.ensure(ID, stored_checkpoint[0].digest)
    status = await bench.controller.state(ID, InstanceState.FAILED)
    assert status.error is not None
    assert (status.error.code, "the node stumbled" in status.error.message) == ("instance_failed", True)


async def test_a_process_that_cannot_be_started_is_started_again_later(bench: Bench) -> None:
    bench.processes.fault = OSError("no more processes")
    bench.processes.exit(bench.processes.started[0], "exit code 1")
    await bench.until(lambda: len(bench.processes.started) > 2)

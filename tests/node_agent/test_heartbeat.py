"""Engines that live and do nothing: a real agent notices them by their silence, and no others."""

import asyncio
import signal
from pathlib import Path

from nearline.node_agent.heartbeat import Heartbeat
from nearline.node_agent.types import EngineId
from nearline.protocol import CheckpointInfo, InstanceId
from nearline.protocol.frames import InstanceChanged, Ping
from tests.node_agent.conftest import FakeController, running_agent

ENGINE, INSTANCE = EngineId(1), InstanceId("i")
HANG_S = "4"
"""Long enough that a busy machine does not make a living engine look hung."""


async def test_a_stopped_engine_is_killed_its_requests_can_be_resumed_and_the_next_instance_works(
    controller: FakeController, data_dir: Path, stored_checkpoint: tuple[CheckpointInfo, Path]
) -> None:
    digest = stored_checkpoint[0].digest
    async with running_agent(controller, data_dir, "--slots", "1", "--prewarm", "1", "--hang-timeout", HANG_S) as agent:
        await controller.report(lambda r: r.num_prewarmed == 1)
        await controller.ensure("i1", digest)
        await controller.state("i1", "ready")
        await controller.submit("i1", "r1", max_tokens=10**6)
        await controller.hear(lambda f: bool(controller.updates("r1")))
        hung = agent.engines()[0]
        hung.suspend()
        last = (await controller.finished("r1"))[-1]
        assert last.error is not None
        assert last.error.code == "instance_failed", "which the controller resumes elsewhere"
        failed = await controller.state("i1", "failed")
        assert failed.error is not None
        assert "no sign of life" in failed.error.message
        await controller.ensure("i2", digest)
        await controller.state("i2", "ready")
        await controller.submit("i2", "r2")
        assert len(await controller.finished("r2")) == 5
        assert not hung.is_running()


async def test_an_idle_engine_that_hangs_is_replaced_and_an_agent_that_slept_kills_nobody(
    controller: FakeController, data_dir: Path, stored_checkpoint: tuple[CheckpointInfo, Path]
) -> None:
    async with running_agent(controller, data_dir, "--slots", "1", "--prewarm", "1", "--hang-timeout", HANG_S) as agent:
        await controller.report(lambda r: r.num_prewarmed == 1)
        idle = agent.engines()[0]
        idle.suspend()
        await controller.report(lambda r: r.num_prewarmed == 0)
        await controller.report(lambda r: r.num_prewarmed == 1)
        assert not idle.is_running()
        await controller.ensure("i1", stored_checkpoint[0].digest)
        await controller.state("i1", "ready")
        agent.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(5.0)
        agent.process.send_signal(signal.SIGCONT)
        await controller.submit("i1", "r1", max_tokens=300)
        assert len(await controller.finished("r1")) == 300
        states = [f.status.state.value for f in controller.heard if isinstance(f, InstanceChanged)]
        assert "failed" not in states


async def test_a_bound_engine_is_asked_only_once_its_bytes_are_there() -> None:
    asked: list[object] = []
    beat = Heartbeat(lambda _, message: asked.append(message), lambda *_: None, least_s=0.02)
    running = asyncio.create_task(beat.run())
    beat.binding(ENGINE, INSTANCE)
    beat.bound(INSTANCE, 1.0)
    await asyncio.sleep(0.05)
    assert asked == []
    beat.filled(INSTANCE)
    await asyncio.sleep(0.05)
    assert asked == [Ping(1)]
    running.cancel()


async def test_patience_follows_what_the_engine_says_of_its_steps() -> None:
    hung = asyncio.Event()
    beat = Heartbeat(lambda *_: None, lambda *_: hung.set(), least_s=0.02)
    running = asyncio.create_task(beat.run())
    beat.binding(ENGINE, INSTANCE)
    beat.bound(INSTANCE, 3600.0)
    beat.filled(INSTANCE)
    await asyncio.sleep(0.2)
    assert not hung.is_set(), "it may be silent for ten hours"
    beat.answered(ENGINE, 1, 0.001)
    async with asyncio.timeout(60):
        await hung.wait()
    running.cancel()

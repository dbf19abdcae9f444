"""A measurement of steps keeps its model awake until it ends, however it ends; but not from those who need the slot."""

import asyncio
from contextlib import aclosing

import pytest

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.journal import digest, replay
from nearline.protocol import Digest, StepProfile, StepTimeModel, TaskId
from nearline.protocol.errors import ErrorInfo, InstanceFailed, NearlineError
from nearline.protocol.frames import (
    CancelTask,
    ProfileFinished,
    ProfileInstance,
    ProfileProgress,
    StopInstance,
    TaskFailed,
)
from tests.controller.fake_agent import FakeAgent
from tests.controller.fleets import World, model, world
from tests.controller.test_runtime import Fleet, collect, eventually, fleet, request

__all__ = ["fleet"]

TASK, OTHER, DIGEST = TaskId("profile-1"), TaskId("profile-2"), Digest("digest-of-a")
BEGAN, ENDED = happened.MeasurementBegan(TASK, DIGEST), happened.MeasurementEnded(TASK, DIGEST)


PROFILE = StepProfile(DIGEST, "cpu", 2, StepTimeModel.guess(10**9), 0.04, 0.02, 30, 1e9, 1.75e9)


def idle_since_0(keep_alive_s: float) -> World:
    w = world("a", "b", keep_alive_s=keep_alive_s)
    w.arrive("r1")
    w.start_all()
    w.token("r1")
    w.finish("r1")
    w.take(do.StopInstance)
    return w


def test_an_idle_instance_stays_while_it_is_measured_and_goes_when_the_last_measurement_ends() -> None:
    w = idle_since_0(keep_alive_s=5.0)
    w.post(BEGAN)
    w.post(happened.MeasurementBegan(OTHER, DIGEST))
    w.sleep(100.0)
    w.post(ENDED)
    assert not w.take(do.StopInstance)
    w.post(happened.MeasurementEnded(OTHER, DIGEST))
    (stop,) = w.take(do.StopInstance)
    assert "idle for 100.0 s" in stop.reason


def test_a_short_measurement_leaves_the_rest_of_the_keep_alive_as_it_was() -> None:
    w = idle_since_0(keep_alive_s=5.0)
    w.post(BEGAN)
    w.sleep(2.0)
    w.post(ENDED)
    w.sleep(2.9)
    assert not w.take(do.StopInstance)
    w.sleep(0.2)
    assert w.take(do.StopInstance)


def test_a_measurement_that_begins_before_the_start_holds_a_model_that_is_kept_alive_for_no_time_at_all() -> None:
    w = world("a", keep_alive_s=0.0)
    w.post(BEGAN)
    w.arrive("r1")
    w.start_all()
    w.token("r1")
    w.finish("r1")
    w.sleep(100.0)
    assert not w.take(do.StopInstance)
    w.post(ENDED)
    assert w.take(do.StopInstance)


def test_a_measured_instance_gives_its_slot_to_a_model_that_waits() -> None:
    w = idle_since_0(keep_alive_s=5.0)
    w.post(BEGAN)
    w.sleep(50.0)
    w.arrive("r2", "b")
    (stop,) = w.take(do.StopInstance)
    assert stop.reason.startswith("b waits")
    w.post(ENDED)
    w.start_all()
    assert "r2" in w.running()


def test_a_model_that_is_removed_is_not_held_by_its_measurement() -> None:
    w = idle_since_0(keep_alive_s=5.0)
    w.post(BEGAN)
    w.post(happened.ModelRemoved(model("a").model_id))
    assert w.take(do.StopInstance)


def stops(agent: FakeAgent) -> list[StopInstance]:
    return [frame for frame in agent.received if isinstance(frame, StopInstance)]


def wishes(agent: FakeAgent) -> list[ProfileInstance]:
    return [frame for frame in agent.received if isinstance(frame, ProfileInstance)]


@pytest.mark.parametrize("how", ["finished", "failed", "left", "link"])
async def test_a_live_measurement_keeps_its_instance_until_it_ends_in_whatever_way(fleet: Fleet, how: str) -> None:
    fleet.runtime.add_model(model("a", keep_alive_s=0.0))
    seen: list[object] = []

    async def start() -> None:
        await collect(fleet.runtime.open(request()))

    async def measure() -> None:
        async with aclosing(fleet.runtime.profile_checkpoint(DIGEST, start)) as frames:
            async for _, frame in frames:
                seen.append(frame)

    async with fleet.agent() as agent:
        measuring = asyncio.create_task(measure())
        await eventually(lambda: bool(wishes(agent)))
        (wish,) = wishes(agent)
        await agent.send(ProfileProgress(wish.task_id, "decode", 1, 9))
        await eventually(lambda: bool(seen))
        await asyncio.sleep(0.1)
        assert not stops(agent), "the start's own request is over, and the model is kept alive for no time at all"
        if how == "finished":
            await agent.send(ProfileFinished(wish.task_id, PROFILE))
        elif how == "failed":
            await agent.send(TaskFailed(wish.task_id, ErrorInfo.of(InstanceFailed("the engine process ended"))))
        elif how == "left":
            measuring.cancel()
        else:
            await agent.hang_up()
            await agent.dial()
        await eventually(lambda: bool(stops(agent)))
        (outcome,) = await asyncio.gather(measuring, return_exceptions=True)
        assert (outcome is None) == (how == "finished")
        assert isinstance(outcome, NearlineError) == (how in ("failed", "link"))
        assert (CancelTask(wish.task_id) in agent.received) == (how == "left")
    recorded = [type(event) for _, event, _ in replay(fleet.journal)]
    assert recorded.count(happened.MeasurementBegan) == recorded.count(happened.MeasurementEnded) == 1
    assert digest(replay(fleet.journal)) == digest(replay(fleet.journal))

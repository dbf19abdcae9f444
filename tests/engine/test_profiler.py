"""A profile taken by a real engine process of a tiny model, and the plan behind it with a machine of known pace."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nearline.engine.profile_plan import LONGEST_STEP_S, NUM_REPEATS, ProfileLimits, ProfilePlan
from nearline.protocol import StepProfile, StepTimeModel, TaskId
from nearline.protocol.frames import (
    CancelTask,
    Ping,
    Pong,
    ProfileFinished,
    ProfileInstance,
    ProfileProgress,
    StepDone,
    TaskFailed,
    Unbind,
)
from tests.engine.checkpoints import Oracle
from tests.engine.engine_process import INSTANCE, EngineUnderTest
from tests.engine.fake_engine import make_request

LIMITS = ProfileLimits(max_context_tokens=2048, kv_tokens=65536, max_step_tokens=512, max_running=32)
TRUE = StepTimeModel(
    prefill_base_s=0.006, prefill_per_token_s=3e-4, prefill_per_square_s=2e-8,
    decode_base_s=0.005, decode_per_context_s=4e-7, decode_per_sequence_s=7e-4,
)  # fmt: skip


def measured(model: StepTimeModel, num_bytes: int) -> tuple[ProfilePlan, list[float]]:
    plan, times = ProfilePlan(num_bytes, LIMITS), []
    while (shape := plan.next()) is not None:
        assert LIMITS.allow(shape)
        times.append(model.step_s(shape.work))
        plan.observe(times[-1])
    return plan, times


def test_the_plan_finds_the_pace_of_a_machine_that_keeps_the_law() -> None:
    plan, _ = measured(TRUE, 270_000_000)
    model, prefill_error, decode_error, num_steps = plan.result()
    assert max(prefill_error, decode_error) < 0.01
    assert plan.num_total == plan.num_done == NUM_REPEATS * num_steps
    assert num_steps > 20
    for num_tokens, start in ((100, 0), (512, 1024)):
        assert model.prefill_s(num_tokens, start) == pytest.approx(TRUE.prefill_s(num_tokens, start), rel=0.02)
    for num_sequences, context in ((1, 100), (24, 20_000)):
        assert model.decode_s(num_sequences, context) == pytest.approx(TRUE.decode_s(num_sequences, context), rel=0.02)


def test_a_machine_that_is_disturbed_for_a_while_is_measured_as_it_is_without() -> None:
    plan, spent_s = ProfilePlan(270_000_000, LIMITS), 0.0
    while (shape := plan.next()) is not None:
        seconds = TRUE.step_s(shape.work) * (2.0 if spent_s < 0.3 else 1.0)
        spent_s += seconds
        plan.observe(seconds)
    model, prefill_error, decode_error, _ = plan.result()
    assert max(prefill_error, decode_error) < 0.01
    assert model.prefill_s(20) == pytest.approx(TRUE.prefill_s(20), rel=0.02)
    assert model.decode_s(1, 100) == pytest.approx(TRUE.decode_s(1, 100), rel=0.02)


def test_on_a_slow_machine_the_long_steps_are_left_out() -> None:
    slow = StepTimeModel.guess(14_000_000_000)
    plan, times = measured(slow, 14_000_000_000)
    assert plan.result()[3] < 20
    assert sum(seconds > 1.2 * LONGEST_STEP_S for seconds in times) <= 2 * 4 * 3, "no more than the fewest of each law"
    assert sum(times) < 120


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Iterator[EngineUnderTest]:
    engine = EngineUnderTest()
    engine.bind(checkpoints["a"])
    yield engine
    engine.close()


def test_a_profile_measures_real_steps_and_lets_requests_go_first(
    engine: EngineUnderTest, oracles: dict[str, Oracle]
) -> None:
    engine.send(ProfileInstance(TaskId("t"), INSTANCE))
    engine.expect(ProfileProgress)
    prompt = [5, 6, 7, 8] * 9
    assert engine.generate(make_request("r", prompt, max_tokens=12, ignore_eos=True)) == [oracles["a"](prompt)]
    profile: StepProfile = engine.expect(ProfileFinished).profile
    served = [i for i, message in enumerate(engine.inbox) if isinstance(message, StepDone)]
    between = engine.inbox[served[0] : served[-1]]
    assert not any(isinstance(message, ProfileProgress) for message in between), "measured between a request's steps"
    assert profile.num_steps >= 8
    assert 0 < profile.model.decode_s(1, 32) < 1
    assert 0 < profile.model.prefill_s(64) < 1
    assert profile.copy_bytes_per_s > 1e6
    assert engine.generate(make_request("after", prompt, max_tokens=12, ignore_eos=True)) == [oracles["a"](prompt)]


def test_a_profile_nobody_waits_for_ends_and_a_second_one_at_once_is_refused(engine: EngineUnderTest) -> None:
    engine.send(ProfileInstance(TaskId("t1"), INSTANCE), ProfileInstance(TaskId("t2"), INSTANCE))
    refused = engine.expect(TaskFailed, where=lambda message: message.task_id == "t2")
    assert refused.error.code == "overloaded"
    engine.send(CancelTask(TaskId("t1")), Ping(7))
    pong = engine.expect(Pong, where=lambda pong: pong.number == 7)
    assert 0 < pong.longest_step_s < 1, "a tiny model's steps are short"
    engine.send(ProfileInstance(TaskId("t3"), INSTANCE))
    engine.expect(ProfileProgress, where=lambda progress: progress.task_id == "t3")
    engine.send(Unbind())
    failed = engine.expect(TaskFailed, where=lambda message: message.task_id == "t3")
    assert failed.error.code == "instance_failed"

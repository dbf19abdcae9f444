"""Merged or not, step by step: who gains, who waits, and for how long at most."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearline.engine.merging import AlwaysMerged, MergeCosts, MergeLimits, MergeMeter, MergePolicy
from nearline.protocol import Digest

A, B, C = Digest("a"), Digest("b"), Digest("c")
COSTS, LIMITS = MergeCosts(speed=0.6, merge_s=0.2), MergeLimits(min_saving=0.1, max_wait_s=0.5)
STEP_S = 0.03


def run(policy: MergePolicy, runnable: dict[Digest | None, int], num_steps: int, start_s: float = 0.0) -> list[str]:
    """The mode of each step; an unmerged step takes STEP_S, a merged one less by the policy's own costs."""
    now, modes = start_s, []
    for _ in range(num_steps):
        decision = policy.decide(runnable, now)
        merged = decision.merged
        if decision.wanted is not None:
            policy.copy_made(decision.wanted)
        modes.append(merged or "-")
        now += STEP_S * (COSTS.speed if merged else 1.0)
    return modes


def test_one_adapter_alone_is_merged_once_the_copy_has_paid_for_itself() -> None:
    modes = run(MergePolicy(COSTS, LIMITS), {A: 8}, 100)
    first = modes.index(A)
    assert (1 - COSTS.speed) * STEP_S * first == pytest.approx(COSTS.merge_s, abs=STEP_S)
    assert set(modes[first:]) == {A}


@pytest.mark.parametrize("runnable", [{A: 1, B: 1, C: 1}, {A: 4, B: 4}, {None: 8}, {None: 8, A: 2}, {}])
def test_many_adapters_or_the_base_alone_are_never_merged(runnable: dict[Digest | None, int]) -> None:
    assert set(run(MergePolicy(COSTS, LIMITS), runnable, 500)) == {"-"}


def test_where_merging_saves_little_nothing_is_ever_merged() -> None:
    assert set(run(MergePolicy(MergeCosts(0.95, 0.0), LIMITS), {A: 8}, 200)) == {"-"}
    assert set(run(MergePolicy(MergeCosts()), {A: 8}, 200)) == {"-"}, "off until somebody has measured"


def test_a_lone_request_in_99_percent_of_one_adapter_waits_no_longer_than_stated() -> None:
    policy, runnable = MergePolicy(COSTS, LIMITS), dict[Digest | None, int]({A: 99, B: 1})
    modes = run(policy, runnable, 2000)
    longest, current, served_s, total_s = 0.0, 0.0, 0.0, 0.0
    for mode in modes[modes.index(A) :]:
        step_s = STEP_S * (COSTS.speed if mode == A else 1.0)
        current = current + step_s if mode == A else 0.0
        longest, total_s = max(longest, current), total_s + step_s
        served_s += step_s if mode == "-" else 0.0
    assert longest <= LIMITS.max_wait_s + STEP_S
    assert served_s >= 0.49 * total_s
    switches = sum(one != other for one, other in itertools.pairwise(modes))
    assert switches <= 2 + 2 * total_s / (2 * LIMITS.max_wait_s), "hysteresis: at most one turn per bound each way"


@given(
    st.lists(st.tuples(st.dictionaries(st.sampled_from([None, A, B, C]), st.integers(1, 40)), st.floats(0.001, 0.1)))
)
@settings(max_examples=100, deadline=None)
def test_always_merged_everybody_who_can_run_gets_a_turn_within_the_bound(
    steps: list[tuple[dict[Digest | None, int], float]],
) -> None:
    policy, now, waited = AlwaysMerged(LIMITS, 2), 0.0, dict.fromkeys([None, A, B, C], 0.0)
    for runnable, step_s in steps:
        decision = policy.decide(runnable, now)
        if decision.wanted is not None:
            policy.copy_made(decision.wanted)
        turn = decision.merged or decision.wanted
        assert turn in runnable or not runnable
        for adapter in waited:
            waited[adapter] = waited[adapter] + step_s if adapter in runnable and adapter != turn else 0.0
            assert waited[adapter] <= 3 * (LIMITS.max_wait_s + 0.2) + 1e-9, (
                "three others, and the longest step twice each"
            )
        now += step_s


def test_a_meter_believes_what_it_measures() -> None:
    meter = MergeMeter(0.05, 0.2)
    assert meter.costs.speed == pytest.approx(1 / 1.1)
    for _ in range(200):
        meter.step(True, 0.9)
        meter.step(False, 1.2)
    meter.copy(0.4)
    assert meter.costs.speed == pytest.approx(0.75, abs=0.01)
    assert meter.costs.merge_s == pytest.approx(0.3)


def test_a_copy_that_is_there_is_used_again_at_once_when_the_others_are_gone() -> None:
    policy = MergePolicy(COSTS, LIMITS)
    run(policy, {A: 8}, 40)
    assert policy.kept == (A,)
    assert run(policy, {A: 4, B: 4}, 5, start_s=10) == ["-"] * 5
    assert run(policy, {A: 8}, 3, start_s=20) == [A] * 3


def test_rent_is_kept_while_others_dominate_and_each_gets_a_copy_of_its_own() -> None:
    policy, modes = MergePolicy(COSTS, LIMITS, 2), list[str]()
    for turn in range(40):
        modes += run(policy, {(A, B)[turn % 2]: 8}, 2, start_s=turn * 2 * STEP_S)
    assert set(policy.kept) == {A, B}, "neither dominated for long enough in one go"
    assert modes[-4:] == [A, A, B, B]


def test_the_copy_used_least_recently_leaves_and_is_paid_for_anew() -> None:
    policy = MergePolicy(COSTS, LIMITS, 2)
    for start_s, adapter in enumerate((A, B, A, C)):
        run(policy, {adapter: 8}, 40, start_s=10.0 * start_s)
    assert policy.kept == (A, C)
    assert run(policy, {B: 8}, 3, start_s=50.0) == ["-"] * 3


def test_alone_it_runs_merged_where_its_copy_is_however_little_that_saves() -> None:
    policy = MergePolicy(MergeCosts(1.0, 0.2), LIMITS)
    policy.copy_made(A)
    assert run(policy, {A: 1}, 3) == [A] * 3
    assert run(policy, {A: 8, B: 1}, 3, start_s=1.0) == ["-"] * 3


@pytest.mark.parametrize("policy", [MergePolicy(COSTS, LIMITS), AlwaysMerged(LIMITS)])
def test_a_copy_half_overwritten_by_another_is_no_copy_any_more(policy: MergePolicy | AlwaysMerged) -> None:
    policy.decide({A: 8}, 0.0)
    policy.copy_made(A)
    now = next(now for now in range(1, 9) if policy.decide({B: 8}, now).wanted == B)
    assert policy.decide({A: 8}, now + 0.01).merged is None


@given(
    st.lists(st.tuples(st.dictionaries(st.sampled_from([None, A, B, C]), st.integers(1, 40)), st.floats(0.001, 0.1)))
)
@settings(max_examples=100, deadline=None)
def test_whatever_comes_nobody_who_can_run_waits_longer_than_the_bound_and_one_step(
    steps: list[tuple[dict[Digest | None, int], float]],
) -> None:
    policy, now, waited = MergePolicy(COSTS, LIMITS, 2), 0.0, dict.fromkeys([None, A, B, C], 0.0)
    for runnable, step_s in steps:
        decision = policy.decide(runnable, now)
        merged = decision.merged
        if decision.wanted is not None:
            policy.copy_made(decision.wanted)
        assert merged is None or merged in runnable
        for adapter in waited:
            is_displaced = adapter in runnable and merged not in (None, adapter)
            waited[adapter] = waited[adapter] + step_s if is_displaced else 0.0
            assert waited[adapter] <= LIMITS.max_wait_s + step_s + 1e-9
        now += step_s

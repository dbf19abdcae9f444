"""Merged or not, step by step: who gains, whose copy is made and when, who waits, and for how long at most."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearline.engine.config import EngineConfig, MergeMode
from nearline.engine.merge_meter import MergeMeter
from nearline.engine.merge_turns import MergeTurns
from nearline.engine.merging import IDLE_SHARE, AloneMerged, AlwaysMerged, MergeCosts, MergedCopies
from nearline.engine.sequence import Sequence
from nearline.engine.types import Batch, BatchItem
from nearline.protocol import Digest, ModelId, Request, RequestId, SamplingParams, StepTimeModel

A, B, C = Digest("a"), Digest("b"), Digest("c")
COSTS = MergeCosts(saving_s=0.001, merge_s=0.1)
MAX_WAIT_S = 0.5
PACE = StepTimeModel(
    prefill_base_s=0.01,
    prefill_per_token_s=0.0001,
    prefill_per_square_s=0.0,
    decode_base_s=0.01,
    decode_per_context_s=0.0,
    decode_per_sequence_s=0.001,
)


def always(_: Digest) -> bool:
    return True


def batch(*adapters: Digest | None, merged: Digest | None = None, num_tokens: int = 1) -> Batch:
    items = []
    for index, adapter in enumerate(adapters):
        request = Request(RequestId(str(index)), ModelId("m"), (1, 2), SamplingParams(), adapter_digest=adapter)
        items.append(BatchItem(Sequence(request, 1, [1, 2], arrived_at=0.0), 8, num_tokens, True))
    return Batch(items, merged=merged)


def steps_until_copied(policy: AloneMerged, adapter: Digest, is_idle: bool = False) -> int:
    """How many steps an adapter runs alone, unmerged, until its copy is made."""
    for count in range(1000):
        if (wanted := policy.to_copy(is_idle, always)) is not None:
            policy.copy_made(wanted)
            return count
        assert not policy.alone(adapter)
    raise AssertionError("never copied")


@pytest.mark.parametrize(("is_idle", "share"), [(False, 1.0), (True, IDLE_SHARE)])
def test_a_copy_is_made_once_what_it_would_have_saved_pays_for_it(is_idle: bool, share: float) -> None:
    policy = AloneMerged(COSTS)
    count = steps_until_copied(policy, A, is_idle)
    assert count * COSTS.saving_s == pytest.approx(share * COSTS.merge_s, abs=COSTS.saving_s)
    assert policy.alone(A)
    assert not policy.alone(B)


def test_where_merging_saves_nothing_no_copy_is_made() -> None:
    policy = AloneMerged(MergeCosts(saving_s=0.0, merge_s=0.1))
    assert not any(policy.alone(A) for _ in range(1000))
    assert policy.to_copy(True, always) is None


def test_rent_is_kept_while_others_run_and_each_gets_a_copy_of_its_own() -> None:
    policy = AloneMerged(COSTS, 2)
    for turn in range(500):
        policy.alone((A, B)[turn % 2])
        if (wanted := policy.to_copy(False, always)) is not None:
            policy.copy_made(wanted)
    assert set(policy.copies.kept) == {A, B}


def test_as_many_copies_are_kept_as_find_room() -> None:
    copies = MergedCopies(8)
    names = [Digest(str(n)) for n in range(10)]
    for index, name in enumerate(names):
        copies.made(name)
        assert copies.kept == tuple(names[max(0, index - 7) : index + 1])


def test_the_copy_used_least_recently_leaves_and_is_paid_for_anew() -> None:
    policy = AloneMerged(COSTS, 2)
    for adapter in (A, B):
        steps_until_copied(policy, adapter)
    assert policy.alone(A)
    steps_until_copied(policy, C)
    assert policy.copies.kept == (A, C)
    assert steps_until_copied(policy, B) * COSTS.saving_s == pytest.approx(COSTS.merge_s, abs=COSTS.saving_s)


def test_a_copy_half_overwritten_by_another_is_no_copy_any_more() -> None:
    policy = AloneMerged(COSTS)
    policy.copy_made(A)
    while policy.to_copy(False, always) is None:
        policy.alone(B)
    assert not policy.alone(A)


def test_what_is_begun_is_finished_before_the_next_unless_its_adapter_has_gone() -> None:
    policy = AloneMerged(COSTS, 2)
    while policy.to_copy(False, always) is None:
        policy.alone(A)
    for _ in range(500):
        policy.alone(B)
    assert policy.to_copy(False, always) == A
    assert policy.to_copy(False, lambda adapter: adapter != A) == B


def test_a_copy_begun_in_idle_time_waits_for_more_while_others_run() -> None:
    policy = AloneMerged(COSTS)
    while policy.to_copy(True, always) is None:
        policy.alone(A)
    assert policy.to_copy(False, always) is None
    assert policy.to_copy(True, always) == A


def turns(**config: Any) -> MergeTurns:
    return MergeTurns(EngineConfig(num_blocks=1, merge=MergeMode.AUTO, merge_bytes=1, **config), PACE, always)


@given(
    st.lists(st.tuples(st.lists(st.sampled_from([None, A, B, C]), max_size=6), st.booleans()), max_size=60),
    st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_auto_nobody_ever_waits_and_only_whoever_is_alone_and_has_a_copy_runs_merged(
    steps: list[tuple[list[Digest | None], bool]], num_copies: int
) -> None:
    merge = turns(merge_copies=num_copies)

    def schedule_all(_: float, may_run: Callable[[Sequence], bool] | None) -> Batch | None:
        assert may_run is None, "somebody was held back"
        return batch(*adapters) if adapters else None

    for now, (adapters, is_made) in enumerate(steps):
        kept = merge.kept
        step = merge.schedule([], float(now), schedule_all)
        assert (step is None) == (not adapters)
        if step is not None:
            expected = adapters[0] if len(set(adapters)) == 1 and adapters[0] in kept else None
            assert step.merged == expected
            merge.measured(step, 0.02)
        if is_made and merge.wanted is not None:
            assert merge.wanted not in merge.kept
            merge.copy_made(merge.wanted, 0.01)
        assert len(merge.kept) <= num_copies


@given(
    st.lists(st.tuples(st.sets(st.sampled_from([None, A, B, C])), st.floats(0.001, 0.1))),
)
@settings(max_examples=100, deadline=None)
def test_always_merged_everybody_who_can_run_gets_a_turn_within_the_bound(
    steps: list[tuple[set[Digest | None], float]],
) -> None:
    policy, now, waited = AlwaysMerged(MAX_WAIT_S, 2), 0.0, dict.fromkeys([None, A, B, C], 0.0)
    for runnable, step_s in steps:
        merged = policy.decide(sorted(runnable, key=str), now).merged
        turn = merged or policy.copies.wanted
        if policy.copies.wanted is not None:
            policy.copy_made(policy.copies.wanted)
        assert turn in runnable or turn is None
        for adapter in waited:
            waited[adapter] = waited[adapter] + step_s if adapter in runnable and adapter != turn else 0.0
            assert waited[adapter] <= 3 * (MAX_WAIT_S + 0.2) + 1e-9, "three others, and the longest step twice each"
        now += step_s


def test_always_a_copy_is_left_for_that_of_whoevers_turn_it_is() -> None:
    policy = AlwaysMerged(MAX_WAIT_S)
    assert policy.decide([A], 0.0).merged is None
    assert policy.copies.wanted == A
    assert policy.decide([B], 0.1).merged is None
    assert policy.copies.wanted == B
    policy.copy_made(B)
    assert policy.decide([B], 0.2).merged == B


def test_a_meter_learns_what_an_adapter_adds_to_a_step_at_any_size() -> None:
    meter = MergeMeter(PACE, 0.2)
    assert meter.costs.saving_s == pytest.approx(0.08 * PACE.decode_base_s)
    for count in range(600):
        size = 1 + count % 16
        plain_s = 0.02 + 0.0005 * size
        meter.step(batch(*[A] * size), plain_s + 0.003)
        meter.step(batch(*[A] * size, merged=A), plain_s)
        meter.step(batch(*[None] * size), plain_s)
    meter.copy(0.4)
    assert meter.costs.saving_s == pytest.approx(0.003, rel=0.1)
    assert meter.costs.merge_s == pytest.approx(0.3)


def test_a_meter_ignores_what_tells_nothing_and_steps_that_waited_for_something_else() -> None:
    meter = MergeMeter(PACE, 0.2)
    before = meter.costs
    meter.step(batch(A, B), 0.013)
    meter.step(batch(A, num_tokens=8), 0.013)
    meter.step(batch(A), 0.5)
    meter.step(batch(A), 0.5)
    assert meter.costs == before
    meter.step(batch(A), 0.5)
    assert meter.costs != before, "three in a row are believed"

"""Plans against the oracle that tries all of them, and the properties a plan must have."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearline.controller.policy.planner import (
    by_due_date,
    exact,
    is_plan,
    planned,
    score,
)
from nearline.controller.policy.plans import Plan, PlanGroup, PlanSlot
from nearline.controller.solver import best, solve

MODELS = ("a", "b", "c")
SWAP = {"a": 3.0, "b": 5.0, "c": 8.0}
GROUPS = st.lists(
    st.builds(
        PlanGroup,
        st.sampled_from(MODELS),
        st.integers(1, 10).map(float),
        st.integers(-5, 40).map(float),
        st.sampled_from([1.0, 2.0]),
    ),
    min_size=1,
    max_size=5,
)
SLOTS = st.lists(st.builds(PlanSlot, st.sampled_from([None, *MODELS]), st.just(SWAP)), min_size=1, max_size=2)


def test_the_score_of_a_plan_written_by_hand() -> None:
    groups = [PlanGroup("a", 2.0, 10.0), PlanGroup("b", 4.0, 10.0, weight=2.0), PlanGroup("b", 1.0, 9.0)]
    slots = [PlanSlot("a", SWAP), PlanSlot("b", SWAP, free_s=1.0)]
    assert score(((0, 1), (2,)), groups, slots) == (2.0, 2.0 * (2 + 5 + 4 - 10), 2 + 11 + 2, 1)


def test_short_starts_go_first_when_the_longest_start_would_make_all_late() -> None:
    swap = {"big": 18.0, "x": 2.0, "y": 2.0}
    groups = [PlanGroup("big", 1.0, 19.0), PlanGroup("x", 1.0, 20.0), PlanGroup("y", 1.0, 20.0)]
    slots = [PlanSlot(None, swap)]
    assert score(by_due_date(groups, slots), groups, slots)[0] == 2
    assert planned(groups, slots)[0][-1] == 0
    assert score(planned(groups, slots), groups, slots)[0] == 1


@settings(max_examples=40, deadline=None)
@given(GROUPS, SLOTS)
def test_the_search_is_between_due_dates_and_the_oracle_and_plans_every_group_once(
    groups: list[PlanGroup], slots: list[PlanSlot]
) -> None:
    plan = planned(groups, slots)
    assert sorted(index for order in plan for index in order) == list(range(len(groups)))
    ours, dates = score(plan, groups, slots), score(by_due_date(groups, slots), groups, slots)
    oracle = score(exact(groups, slots), groups, slots)
    assert oracle <= ours <= dates
    if dates[0] == 0:
        assert ours[0] == 0, "what due dates can keep, the plan keeps"


def test_the_search_finds_the_oracle_s_violations_nearly_always_and_due_dates_do_not() -> None:
    from random import Random

    stream, num_ours, num_dates = Random(1), 0, 0
    for _ in range(60):
        groups = [PlanGroup(stream.choice(MODELS), stream.uniform(1, 8), stream.uniform(2, 35)) for _ in range(5)]
        slots = [PlanSlot("a", SWAP), PlanSlot(None, SWAP)]
        best = score(exact(groups, slots), groups, slots)[0]
        num_ours += score(planned(groups, slots), groups, slots)[0] == best
        num_dates += score(by_due_date(groups, slots), groups, slots)[0] == best
    assert num_ours >= 54
    assert num_dates < num_ours


@given(st.lists(st.integers(1, 9).map(float), min_size=1, max_size=6))
def test_one_slot_one_model_one_target_is_first_come_first_served(works: list[float]) -> None:
    """With equal work; with unequal work the shorter first makes the total wait less, and that is wanted."""
    groups = [PlanGroup("a", works[0], 1000.0) for _ in works]
    assert planned(groups, [PlanSlot("a", SWAP)]) == (tuple(range(len(works))),)


@settings(max_examples=40, deadline=None)
@given(GROUPS, SLOTS)
def test_swaps_are_the_changes_of_model_from_place_to_place(groups: list[PlanGroup], slots: list[PlanSlot]) -> None:
    plan = planned(groups, slots)
    changes = 0
    for slot, order in zip(slots, plan, strict=True):
        changes += sum(x != y for x, y in pairwise([slot.loaded, *(groups[i].model for i in order)]))
    assert score(plan, groups, slots)[3] == changes


def test_too_many_groups_for_the_oracle_are_said_to_be() -> None:
    with pytest.raises(ValueError, match="8 groups"):
        exact([PlanGroup("a", 1.0, 1.0)] * 8, [PlanSlot("a", SWAP)])


@settings(max_examples=12, deadline=None)
@given(GROUPS, SLOTS)
def test_the_solver_agrees_with_the_oracle(groups: list[PlanGroup], slots: list[PlanSlot]) -> None:
    pytest.importorskip("scipy")
    plan: Plan | None = solve(groups, slots, 20.0)
    assert plan is not None
    expected = score(exact(groups, slots), groups, slots)
    assert score(plan, groups, slots) == pytest.approx(expected, abs=1e-3)


@settings(max_examples=6, deadline=None)
@given(st.lists(GROUPS.map(lambda groups: groups[0]), min_size=8, max_size=9))
def test_beyond_the_oracle_the_solver_s_plan_is_a_plan_even_when_its_time_ends(groups: list[PlanGroup]) -> None:
    pytest.importorskip("scipy")
    slots = [PlanSlot(None, SWAP), PlanSlot("a", SWAP)]
    plan = best(groups, slots, 0.3)
    assert plan is None or is_plan(plan, groups, slots)


def test_a_solver_without_time_answers_nothing() -> None:
    pytest.importorskip("scipy")
    assert solve([PlanGroup("a", 1.0, 1.0)], [PlanSlot("a", SWAP)], 0.0) is None


@settings(max_examples=40, deadline=None)
@given(GROUPS, SLOTS)
def test_the_oracle_is_never_worse_than_due_dates(groups: list[PlanGroup], slots: list[PlanSlot]) -> None:
    oracle, dates = exact(groups, slots), by_due_date(groups, slots)
    assert score(oracle, groups, slots) <= score(dates, groups, slots)
    assert is_plan(oracle, groups, slots)
    assert is_plan(dates, groups, slots)


def test_a_group_planned_twice_or_not_at_all_is_no_plan() -> None:
    groups, slots = [PlanGroup("a", 1.0, 1.0)] * 2, [PlanSlot("a", SWAP)]
    assert is_plan(((1, 0),), groups, slots)
    assert not any(is_plan(plan, groups, slots) for plan in [((0,),), ((0, 0),), ((0, 1), ()), ((0, 1, 2),)])

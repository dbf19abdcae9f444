"""The solver beside the core: a real process, its answers as events, late ones dropped."""

import asyncio
import os
import signal

import pytest

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.actions import SolvePlan
from nearline.controller.config import CoreConfig
from nearline.controller.core import ControllerCore
from nearline.controller.events import PlanSolved
from nearline.controller.plan_solver import PlanSolver
from nearline.controller.policy.planner import exact, planned, score
from nearline.controller.policy.plans import PlanGroup, PlanSlot
from nearline.controller.solver import best
from tests.controller.fleets import GB, World, model, report, resident

SWAP = {str(n): 2.0 + n for n in range(5)}
GROUPS = tuple(PlanGroup(str(n), 1.0 + n, 4.0 + 2 * n, weight=1.0 + n % 2) for n in range(5))
SLOTS = (PlanSlot(None, SWAP), PlanSlot(None, SWAP, 3.0))


def wish(version: int) -> SolvePlan:
    return SolvePlan(version, GROUPS, SLOTS, 5.0, "test")


async def test_the_newest_of_many_questions_is_answered_by_the_oracle_s_plan_and_no_process_stays() -> None:
    answers: list[PlanSolved] = []
    solver = PlanSolver(answers.append)
    for version in range(1, 20):
        solver.ask(wish(version))
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        while not answers or answers[-1].version != 19:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert answers[-1].plan == exact(GROUPS, SLOTS)
    assert len(answers) <= 3
    pid = solver.process.pid
    assert pid is not None
    await solver.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_process_that_dies_costs_one_answer_and_the_next_question_has_a_new_one() -> None:
    answers: list[PlanSolved] = []
    solver = PlanSolver(answers.append)
    solver.ask(wish(1))
    async with asyncio.timeout(60):
        while not answers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert solver.process.pid is not None
        os.kill(solver.process.pid, signal.SIGKILL)
        while len(answers) < 2:
            solver.ask(wish(2))
            await asyncio.sleep(0.2)
    assert solver.num_failures >= 1
    await solver.close()


def rivals(solver_limit_s: float) -> World:
    """Four models that want the only slot, which another holds."""
    w = World(CoreConfig(solver_limit_s=solver_limit_s))
    sizes = {"blocker": GB, "big": 20 * GB, "x": 2 * GB, "y": 9 * GB, "z": 4 * GB}
    for name, size in sizes.items():
        w.post(happened.ModelAdded(model(name, num_bytes=size)))
    residency = tuple(resident(f"digest-of-{name}", size) for name, size in sizes.items())
    w.add_node(report(num_slots=1, residency=residency))
    w.arrive("b", "blocker")
    w.start_all()
    for n, name in enumerate(("big", "x", "y", "z")):
        w.sleep(0.3)
        w.arrive(f"r{n}", name)
    w.sleep(0.5)
    w.post(happened.NodeReported(next(iter(w.nodes.values())).full_report()))
    return w


def test_the_core_asks_once_per_plan_and_only_if_it_may() -> None:
    assert rivals(0.0).take(do.SolvePlan) == []
    asked = rivals(1.0).take(do.SolvePlan)
    assert [one.version for one in asked] == sorted({one.version for one in asked})
    assert len(asked[-1].groups) == 4
    assert asked[-1].reason


def test_late_answers_and_nonsense_change_nothing_and_better_plans_the_order() -> None:
    w = rivals(1.0)
    last = w.take(do.SolvePlan)[-1]
    adviser = w.core._capacity._adviser
    before = dict(adviser._rank)
    reverse = tuple(tuple(reversed(order)) for order in planned(last.groups, last.slots))
    for answer in [
        PlanSolved(last.version - 1, exact(last.groups, last.slots)),
        PlanSolved(last.version, None),
        PlanSolved(last.version, ((0, 0, 1),)),
        PlanSolved(last.version, reverse),
    ]:
        w.post(answer)
        assert adviser._rank == before
    assert adviser.num_late == 1
    adviser._plan, adviser._rank = reverse, {}
    w.post(PlanSolved(last.version, exact(last.groups, last.slots)))
    assert adviser.num_better == 1
    assert len(adviser._rank) == 4


def test_answers_are_events_of_the_journal_so_a_replay_decides_the_same() -> None:
    w = rivals(1.0)
    last = w.take(do.SolvePlan)[-1]
    w.post(PlanSolved(last.version, best(last.groups, last.slots, 1.0)))
    for _ in range(40):
        w.sleep(0.5)
        w.start_all()
        for name in sorted(w.running()):
            w.token(name)
            w.finish(name)
    assert not w.open
    again = ControllerCore(w.config)
    replayed = [action for event, now in w.journal for action in again.on(event, now)]
    kept = [action for action in replayed if not isinstance(action, do.SolvePlan)]
    assert kept == [action for action in w.actions if not isinstance(action, do.SolvePlan)]


@pytest.mark.parametrize("num", [3, 5])
def test_what_the_solver_says_is_never_worse_than_the_search(num: int) -> None:
    found = best(GROUPS[:num], SLOTS, 5.0)
    assert found is not None
    assert score(found, GROUPS[:num], SLOTS) <= score(planned(GROUPS[:num], SLOTS), GROUPS[:num], SLOTS)

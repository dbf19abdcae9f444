"""The planner's goal as a mixed-integer programme for HiGHS, solved in a process of its own (plan_solver.py).

scipy is needed only here. Up to `MAX_EXACT` groups on two slots trying every plan is quicker than HiGHS, and exact.
Beyond, HiGHS keeps its time limit; what it has found of a goal when that ends is its answer, None if that is nothing.
Source: [qlm] positions x[group, slot, place]; ours is lexicographic and counts swaps by model and slot.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence

from nearline.controller.actions import Action, SolvePlan
from nearline.controller.events import PlanSolved
from nearline.controller.pipes import answer_all
from nearline.controller.policy.planner import MAX_EXACT, exact
from nearline.controller.policy.plans import Plan, PlanGroup, PlanSlot
from nearline.protocol import MessageCodec, Seconds, encode

MAX_EXACT_SLOTS = 2
NICENESS = 5
_WISHES = MessageCodec(Action)
_SLACK = 1e-4
"""Room left to an earlier goal while a later one is sought; HiGHS keeps rows to 1e-6 and integers to 1e-6."""


class _Programme:
    """Variables and rows being collected. Names are tuples; binaries have an upper bound of 1."""

    def __init__(self, groups: Sequence[PlanGroup], slots: Sequence[PlanSlot]) -> None:
        self.index: dict[tuple[object, ...], int] = {}
        self.upper: list[float] = []
        self.is_integer: list[bool] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self._groups, self._slots = groups, slots
        self._models = sorted({group.model for group in groups})
        longest = max((max(slot.swap_s[m] for m in self._models) for slot in slots), default=0.0)
        self._far = 1.0 + sum(g.work_s + longest for g in groups) + max(slot.free_s for slot in slots)
        self._far += max(0.0, -min(g.due_s for g in groups))
        self._build()

    def var(self, *name: object, upper: float = float("inf"), is_integer: bool = False) -> int:
        if name not in self.index:
            self.index[name] = len(self.upper)
            self.upper.append(upper)
            self.is_integer.append(is_integer)
        return self.index[name]

    def x(self, g: int, s: int, j: int) -> int:
        return self.var("x", g, s, j, upper=1.0, is_integer=True)

    def row(self, terms: dict[int, float], low: float, high: float = float("inf")) -> None:
        self.rows.append((terms, low, high))

    def _build(self) -> None:
        num, inf = len(self._groups), float("inf")
        for g, group in enumerate(self._groups):
            self.row({self.x(g, s, j): 1.0 for s in range(len(self._slots)) for j in range(num)}, 1.0, 1.0)
            done, late = self.var("end", g), self.var("late", g)
            miss = self.var("miss", g, upper=1.0, is_integer=True)
            self.row({late: 1.0, done: -1.0}, -group.due_s)
            self.row({miss: self._far, done: -1.0}, -group.due_s)
        for s, slot in enumerate(self._slots):
            for j in range(num):
                self._place(s, slot, j)
        for s in range(len(self._slots)):
            for j in range(num):
                self.row({self.x(g, s, j): 1.0 for g in range(num)}, -inf, 1.0)
                for g in range(num):
                    at, done = self.var("at", s, j), self.var("end", g)
                    self.row({done: 1.0, at: -1.0, self.x(g, s, j): -self._far}, -self._far)

    def _place(self, s: int, slot: PlanSlot, j: int) -> None:
        """Time passes from place to place: the work, and a swap wherever the model changes."""
        num, at = len(self._groups), self.var("at", s, j)
        terms = {at: 1.0}
        if j:
            terms[self.var("at", s, j - 1)] = -1.0
            filled = {self.x(g, s, j): -1.0 for g in range(num)}
            self.row({**filled, **{self.x(g, s, j - 1): 1.0 for g in range(num)}}, 0.0)
        for g, group in enumerate(self._groups):
            terms[self.x(g, s, j)] = -group.work_s
        for model in self._models:
            swap = self.var("swap", s, j, model, upper=1.0)
            terms[swap] = -slot.swap_s[model]
            change = {swap: 1.0}
            for g, group in enumerate(self._groups):
                if group.model == model:
                    change[self.x(g, s, j)] = -1.0
                    if j:
                        change[self.x(g, s, j - 1)] = 1.0
            self.row(change, -1.0 if j == 0 and slot.loaded == model else 0.0)
        self.row(terms, 0.0 if j else slot.free_s)

    def goals(self) -> list[dict[int, float]]:
        """The four objectives, the most important first."""
        groups = list(enumerate(self._groups))
        return [
            {self.var("miss", g): group.weight for g, group in groups},
            {self.var("late", g): group.weight for g, group in groups},
            {self.var("end", g): 1.0 for g, _ in groups},
            {index: 1.0 for name, index in self.index.items() if name[0] == "swap"},
        ]


def solve(groups: Sequence[PlanGroup], slots: Sequence[PlanSlot], time_limit_s: Seconds) -> Plan | None:
    """Find the best plan, or None if there was no time. Raises ImportError without scipy."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import lil_matrix

    programme = _Programme(groups, slots)
    num_vars, deadline = len(programme.upper), time.monotonic() + time_limit_s
    rows = list(programme.rows)
    solution = None
    for goal in programme.goals():
        matrix = lil_matrix((len(rows), num_vars))
        for at, (terms, _, _) in enumerate(rows):
            for index, factor in terms.items():
                matrix[at, index] = factor
        cost = np.zeros(num_vars)
        cost[list(goal)] = list(goal.values())
        found = None
        for has_presolve in (True, False):  # HiGHS's presolve sometimes loses a feasible programme
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            found = milp(
                cost,
                constraints=LinearConstraint(matrix.tocsr(), [row[1] for row in rows], [row[2] for row in rows]),
                bounds=Bounds(np.zeros(num_vars), np.array(programme.upper)),
                integrality=np.array(programme.is_integer, dtype=int),
                options={"time_limit": left_s, "presolve": has_presolve},
            )
            if found.status == 0 or found.x is not None:
                break
        if found is None or found.x is None:
            break  # no time: what was found for the goals before is still a plan
        solution = found.x
        if found.status != 0:
            break
        rows.append((goal, float("-inf"), float(found.fun) + _SLACK))
    return None if solution is None else _plan(programme, solution, len(groups), len(slots))


def _plan(programme: _Programme, solution: Sequence[float], num_groups: int, num_slots: int) -> Plan:
    def order(s: int) -> tuple[int, ...]:
        places = [(j, g) for j in range(num_groups) for g in range(num_groups)]
        return tuple(g for j, g in places if solution[programme.x(g, s, j)] > 0.5)

    return tuple(order(s) for s in range(num_slots))


def best(groups: Sequence[PlanGroup], slots: Sequence[PlanSlot], time_limit_s: Seconds) -> Plan | None:
    """Find the best plan there is time for: by trying all while they are few, else by HiGHS."""
    if len(groups) <= MAX_EXACT and len(slots) <= MAX_EXACT_SLOTS:
        return exact(groups, slots)
    try:
        return solve(groups, slots, time_limit_s)
    except ImportError:  # optional; the search that runs live serves alone
        return None


def _answer(question: bytes) -> bytes:
    wish = _WISHES.decode(question)
    assert isinstance(wish, SolvePlan), "nothing else is asked here"
    return encode(PlanSolved(wish.version, best(wish.groups, wish.slots, wish.time_limit_s)))


def main() -> int:
    """Answer every SolvePlan on stdin with a PlanSolved on stdout, until stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the controller's to act on
    os.nice(NICENESS)
    answer_all(_answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())

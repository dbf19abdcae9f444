"""Which groups run on which slot in which order. Pure.

The goal is lexicographic: weighted violations, then weighted tardiness, then the total wait, then swaps. Unlike a sum
of penalties under hard constraints this still says what to do when not everything can be in time.
`exact` looks at every plan (the oracle, for a handful of groups); `planned` is due-date order followed by a search that
moves single groups and exchanges pairs while that helps. The same goal for a solver stands in controller/solver.py.
Source: [qlm] groups on virtual queues; its artifact minimises total completion time and gives up under overload.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations

from nearline.controller.policy.plans import Plan, PlanGroup, PlanSlot
from nearline.protocol import Seconds

MAX_EXACT = 7
_MAX_ROUNDS = 50


Score = tuple[float, float, float, int]
"""Weighted violations, weighted tardiness, total wait (seconds), swaps; smaller is better."""


def score(plan: Plan, groups: Sequence[PlanGroup], slots: Sequence[PlanSlot]) -> Score:
    """Judge a plan."""
    violations, tardiness, wait, swaps = 0.0, 0.0, 0.0, 0
    for slot, order in zip(slots, plan, strict=True):
        now, loaded = slot.free_s, slot.loaded
        for index in order:
            group = groups[index]
            if group.model != loaded:
                now += slot.swap_s[group.model]
                loaded = group.model
                swaps += 1
            now += group.work_s
            wait += now
            if now > group.due_s:
                violations += group.weight
                tardiness += group.weight * (now - group.due_s)
    return (violations, tardiness, wait, swaps)


def exact(groups: Sequence[PlanGroup], slots: Sequence[PlanSlot]) -> Plan:
    """Try every plan. Raises ValueError beyond `MAX_EXACT` groups."""
    if len(groups) > MAX_EXACT:
        raise ValueError(f"{len(groups)} groups have too many plans to try them all (limit {MAX_EXACT})")
    return min(_all_plans(len(groups), len(slots)), key=lambda plan: (score(plan, groups, slots), plan))


def is_plan(plan: Plan, groups: Sequence[PlanGroup], slots: Sequence[PlanSlot]) -> bool:
    """Whether a plan puts every group on some slot exactly once."""
    return len(plan) == len(slots) and sorted(i for order in plan for i in order) == list(range(len(groups)))


def by_due_date(groups: Sequence[PlanGroup], slots: Sequence[PlanSlot]) -> Plan:
    """Put groups in order of due date, each on the slot where it ends first."""
    plan: list[tuple[int, ...]] = [()] * len(slots)
    ends = [(slot.free_s, slot.loaded) for slot in slots]
    for index in sorted(range(len(groups)), key=lambda i: (groups[i].due_s, i)):
        group = groups[index]
        when = [at + group.work_s + (slot.swap_s[group.model] if group.model != loaded else 0.0)
                for slot, (at, loaded) in zip(slots, ends, strict=True)]  # fmt: skip
        best = min(range(len(slots)), key=lambda s: (when[s], s))
        plan[best] = (*plan[best], index)
        ends[best] = (when[best], group.model)
    return tuple(plan)


def planned(groups: Sequence[PlanGroup], slots: Sequence[PlanSlot]) -> Plan:
    """Improve the due-date order until no move and no exchange helps; never worse than it."""
    best = by_due_date(groups, slots)
    best_score = score(best, groups, slots)
    for _ in range(_MAX_ROUNDS):
        found = min(((score(p, groups, slots), p) for p in _neighbours(best)), default=(best_score, best))
        if found[0] >= best_score:
            break
        best_score, best = found
    return best


def sequence(plan: Plan, groups: Sequence[PlanGroup], slots: Sequence[PlanSlot]) -> list[int]:
    """Return the groups of all slots in the order in which they begin."""
    begins: list[tuple[Seconds, int, int]] = []
    for s, (slot, order) in enumerate(zip(slots, plan, strict=True)):
        now, loaded = slot.free_s, slot.loaded
        for index in order:
            begins.append((now, s, index))
            now += groups[index].work_s + (slot.swap_s[groups[index].model] if groups[index].model != loaded else 0.0)
            loaded = groups[index].model
    return [index for _, _, index in sorted(begins)]


def _all_plans(num_groups: int, num_slots: int) -> Iterator[Plan]:
    """Every order of all groups, cut into slots at every place."""
    for order in permutations(range(num_groups)):
        for cuts in combinations(range(num_groups + num_slots - 1), num_slots - 1):
            bounds = [0, *(cut - n for n, cut in enumerate(cuts)), num_groups]
            yield tuple(order[a:b] for a, b in pairwise(bounds))


def _neighbours(plan: Plan) -> Iterator[Plan]:
    places = [(s, i) for s, order in enumerate(plan) for i in range(len(order))]
    for s, i in places:
        index = plan[s][i]
        without = [(*order[:i], *order[i + 1 :]) if s == t else order for t, order in enumerate(plan)]
        for t, order in enumerate(without):
            for j in range(len(order) + 1):
                if (t, j) != (s, i):
                    yield tuple((*o[:j], index, *o[j:]) if t == u else o for u, o in enumerate(without))
    for (s, i), (t, j) in combinations(places, 2):
        lists = [list(order) for order in plan]
        lists[s][i], lists[t][j] = lists[t][j], lists[s][i]
        yield tuple(tuple(order) for order in lists)

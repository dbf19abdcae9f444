"""In which order starved models should get slots: the planner's advice over a receding horizon. Pure.

Advice only orders models that still have time. One that has waited its bound goes first, by due date, whatever the
plan says, so nobody is put off for ever. The plan covers the few models that are due first, on the slots that
come free first; all others follow by due date. It is made anew when a model or a group came or went, when the fleet
changed, and when something that was to be in time is not; at most every `_INTERVAL_S`. The search answers at once; a
solver may find better (SolvePlan), and its answer counts only while the plan it was asked about is in force.
"""

from heapq import nsmallest
from itertools import count

from nearline.controller.actions import SolvePlan
from nearline.controller.config import CoreConfig
from nearline.controller.estimate import start_s, startup
from nearline.controller.events import PlanSolved
from nearline.controller.policy.patience import free_at
from nearline.controller.policy.planner import is_plan, planned, score, sequence
from nearline.controller.policy.plans import Plan, PlanGroup, PlanSlot
from nearline.controller.state import Fleet, ModelKey, ModelRecord, NodeRecord
from nearline.protocol import Seconds

_HORIZON, _SOLVER_HORIZON = 6, 8
"""Models in one plan: as many as the search orders within a few milliseconds; two more when a solver helps."""
_MAX_SLOTS = 2
_INTERVAL_S = 0.2
_LEAST_GROUPS = 3
"""Fewer groups than this the search always orders best."""


class Adviser:
    """Keeps the plan in force and its version. Reads the fleet, changes nothing."""

    def __init__(self, fleet: Fleet, config: CoreConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._horizon = _SOLVER_HORIZON if config.solver_limit_s > 0 else _HORIZON
        self._rank: dict[ModelKey, int] = {}
        self._keys: list[ModelKey] = []
        self._plan: Plan = ()
        self._groups: tuple[PlanGroup, ...] = ()
        self._slots: tuple[PlanSlot, ...] = ()
        self._version = 0
        self._wish: SolvePlan | None = None
        self._planned_at: Seconds = float("-inf")
        self._late_at: Seconds = float("inf")
        self._seen: object = None
        self.num_plans, self.num_better, self.num_late = 0, 0, 0

    def order(self, starved: list[ModelRecord], now: Seconds) -> list[ModelRecord]:
        """Order starved models, which come by due date."""
        if len(starved) < 2:
            return starved
        if now >= self._planned_at + _INTERVAL_S:
            self._look(starved[: self._horizon], now)
        ranks = {m.key: (not self._is_overdue(m, now), self._rank.get(m.key, self._horizon)) for m in starved}
        return sorted(starved, key=lambda m: ranks[m.key] if ranks[m.key][0] else (False, 0))

    def take_wish(self) -> SolvePlan | None:
        """Return what a solver should be asked now, once."""
        wish, self._wish = self._wish, None
        return wish

    def solved(self, answer: PlanSolved) -> bool:
        """Take an answer. True if it is about the plan in force and better: then it is in force."""
        if answer.version != self._version or answer.plan is None:
            self.num_late += answer.version != self._version
            return False
        if not is_plan(answer.plan, self._groups, self._slots):
            return False
        is_better = score(answer.plan, self._groups, self._slots) < score(self._plan, self._groups, self._slots)
        if is_better:
            self.num_better += 1
            self._adopt(answer.plan)
        return is_better

    def _look(self, models: list[ModelRecord], now: Seconds) -> None:
        """Make the plan anew if anything speaks for it."""
        fleet = self._fleet
        groups = tuple((model.key, len(model.queue.busy_groups)) for model in models)
        seen = (groups, sum(node.is_connected for node in fleet.nodes.values()), len(fleet.instances))
        if seen == self._seen and now < self._late_at:
            return
        why = "a request that was to be in time is not" if seen == self._seen else "models, groups or the fleet changed"
        self._seen, self._planned_at = seen, now
        self._replan(models, why, now)

    def _replan(self, models: list[ModelRecord], why: str, now: Seconds) -> None:
        self._version += 1
        self._rank, self._wish, self._late_at = {}, None, float("inf")
        num_slots = sum(d.num_slots for node in self._fleet.nodes.values() for d in node.report.devices)
        if not num_slots or num_slots - len(self._fleet.instances) >= len(models):
            return  # nobody stands in anybody's way
        slots = self._soonest_slots(models, now)
        if not slots:
            return  # every node has lost its link
        self.num_plans += 1
        self._keys = [model.key for model in models]
        self._groups = tuple(self._group(str(n), model, now) for n, model in enumerate(models))
        self._slots = slots
        self._adopt(planned(self._groups, self._slots))
        dues_s = [group.due_s - group.work_s for group in self._groups if group.due_s > group.work_s]
        self._late_at = now + max(_INTERVAL_S, min(dues_s, default=float("inf")))
        if self._config.solver_limit_s > 0 and len(models) >= _LEAST_GROUPS:
            limit_s = self._config.solver_limit_s
            self._wish = SolvePlan(self._version, self._groups, self._slots, limit_s, why)

    def _adopt(self, plan: Plan) -> None:
        self._plan = plan
        self._rank = {self._keys[i]: rank for rank, i in enumerate(sequence(plan, self._groups, self._slots))}

    def _is_overdue(self, model: ModelRecord, now: Seconds) -> bool:
        waited_s = now - (now if model.starved_since is None else model.starved_since)
        return waited_s >= self._config.max_wait_fraction * model.queue.shortest_target_s()

    def _soonest_slots(self, models: list[ModelRecord], now: Seconds) -> tuple[PlanSlot, ...]:
        """The slots that come free first, and how long each model takes to start there."""
        frees: list[tuple[Seconds, int, NodeRecord]] = []
        serial = count()
        for node in self._fleet.nodes.values():
            if not node.is_connected:
                continue
            num_free = sum(device.num_slots for device in node.report.devices) - len(node.instances)
            frees += [(0.0, next(serial), node)] * min(max(0, num_free), _MAX_SLOTS)
            for instance in node.instances.values():
                at = free_at(instance, now, self._config, float("inf"))
                latest_s = self._config.max_wait_fraction * models[0].queue.shortest_target_s()
                frees.append((min(max(0.0, at - now), latest_s + self._config.swap_drain_s), next(serial), node))
        slots = []
        for free_s, _, node in nsmallest(_MAX_SLOTS, frees):
            slots.append(PlanSlot(None, {str(n): self._start_s(m, node, now) for n, m in enumerate(models)}, free_s))
        return tuple(slots)

    def _start_s(self, model: ModelRecord, node: NodeRecord, now: Seconds) -> Seconds:
        if node.holds(model.digest):
            return startup(node, model.digest, model.num_bytes, now).total_s
        return start_s(model, self._fleet.nodes.values(), now)

    def _group(self, name: str, model: ModelRecord, now: Seconds) -> PlanGroup:
        """All that waits for a model. It is in time if its first request begins in time, so work comes on top."""
        groups = model.queue.ordered_groups()
        places = max(1, model.last_places)
        services = [len(g.waiting) * model.waits.service(g.key.length_bucket).mean_s for g in groups]
        work_s = sum(services) / places
        num_waiting = float(model.queue.num_waiting)
        return PlanGroup(name, work_s, groups[0].head().due_at - now + work_s, weight=num_waiting)

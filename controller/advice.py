"""In which order starved models should get slots: the planner's advice over a short horizon. Pure.

Advice only orders models that still have time. One that has waited its bound goes first, by due date, whatever the
plan says, so nobody is put off for ever. The plan is made anew at most every `_INTERVAL_S`, for the `_HORIZON` models
that are due first; all others follow by due date.
"""

from nearline.controller.config import CoreConfig
from nearline.controller.estimate import start_s
from nearline.controller.policy.planner import PlanGroup, PlanSlot, planned, sequence
from nearline.controller.state import Fleet, ModelKey, ModelRecord
from nearline.protocol import Seconds

_HORIZON = 6
_MAX_SLOTS = 2
_INTERVAL_S = 0.2


class Adviser:
    """Keeps the last plan's order. Reads the fleet, changes nothing."""

    def __init__(self, fleet: Fleet, config: CoreConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._rank: dict[ModelKey, int] = {}
        self._planned_at: Seconds = float("-inf")

    def order(self, starved: list[ModelRecord], now: Seconds) -> list[ModelRecord]:
        """Order starved models, which come by due date."""
        if len(starved) < 2:
            return starved
        if now >= self._planned_at + _INTERVAL_S:
            self._planned_at = now
            self._rank = self._plan(starved[:_HORIZON], now)
        ranks = {m.key: (not self._is_overdue(m, now), self._rank.get(m.key, _HORIZON)) for m in starved}
        return sorted(starved, key=lambda m: ranks[m.key] if ranks[m.key][0] else (False, 0))

    def _is_overdue(self, model: ModelRecord, now: Seconds) -> bool:
        waited_s = now - (now if model.starved_since is None else model.starved_since)
        return waited_s >= self._config.max_wait_fraction * model.queue.shortest_target_s()

    def _plan(self, models: list[ModelRecord], now: Seconds) -> dict[ModelKey, int]:
        devices = [device for node in self._fleet.nodes.values() for device in node.report.devices]
        num_slots = sum(device.num_slots for device in devices)
        if num_slots - len(self._fleet.instances) >= len(models) or not num_slots:
            return {}
        nodes = self._fleet.nodes.values()
        swap_s = {str(n): start_s(model, nodes, now) for n, model in enumerate(models)}
        groups = [self._group(str(n), model, now) for n, model in enumerate(models)]
        slots = [PlanSlot(None, swap_s)] * min(num_slots, _MAX_SLOTS)
        order = sequence(planned(groups, slots), groups, slots)
        return {models[index].key: rank for rank, index in enumerate(order)}

    def _group(self, name: str, model: ModelRecord, now: Seconds) -> PlanGroup:
        """All that waits for a model. It is in time if its first request begins in time, so work comes on top."""
        groups = model.queue.ordered_groups()
        places = max(1, model.last_places)
        services = [len(g.waiting) * model.waits.service(g.key.length_bucket).mean_s for g in groups]
        work_s = sum(services) / places
        num_waiting = float(model.queue.num_waiting)
        return PlanGroup(name, work_s, groups[0].head().due_at - now + work_s, weight=num_waiting)

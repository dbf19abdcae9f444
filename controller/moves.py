"""Who moves from one instance of a model to another: who waits inside one in vain, and answers that make way. Pure.

A move is an abort and a dispatch in one step: the engine forgets the sequence, its tokens go to the other one with the
next attempt, and updates of the old attempt change nothing any more.
"""

from nearline.controller.actions import AbortSequence, Dispatch
from nearline.controller.agenda import Agenda
from nearline.controller.config import CoreConfig
from nearline.controller.policy import balance, dispatch, migration
from nearline.controller.requests import RequestDesk
from nearline.controller.state import Fleet, ModelRecord
from nearline.protocol import Seconds

_MOST_RELIEVED = 4
"""Moves for want of memory at once."""


class MoveDesk:
    """Decides moves. Keeps nothing but how many there were: `num_moved` in all, `num_migrated` of them with tokens."""

    def __init__(self, fleet: Fleet, config: CoreConfig, agenda: Agenda, requests: RequestDesk) -> None:
        self._fleet = fleet
        self._config = config
        self._agenda = agenda
        self._requests = requests
        self.num_moved, self.num_migrated = 0, 0

    def rearrange(self, model: ModelRecord, now: Seconds) -> None:
        """Move as long as that makes fewer wait inside instances; for want of memory, at intervals."""
        while (found := self._next(model, now)) is not None:
            self._carry_out(found, now)
        if now >= model.memory_due and (costs := self._costs(model)) is not None:
            model.memory_due = now + self._config.memory_check_s
            for _ in range(_MOST_RELIEVED):
                if (found := migration.relieve(list(model.instances.values()), costs, now, self._config)) is None:
                    break
                self._carry_out(found, now)

    def _costs(self, model: ModelRecord) -> migration.Costs | None:
        """What answers take, once enough was seen."""
        token_s = model.waits.token_s
        if not token_s or not model.resume.is_known:
            return None
        return migration.Costs(token_s, model.service_s, model.resume)

    def _next(self, model: ModelRecord, now: Seconds) -> balance.Move | None:
        is_free = is_held = False
        for instance in model.instances.values():  # most models have no place free, or nobody who waits inside
            load = dispatch.load_of(instance)
            is_free = is_free or (load < instance.max_running and instance.is_usable)
            is_held = is_held or load > instance.max_running or bool(instance.num_preempted)
        if not (is_free and is_held):
            return None
        instances = list(model.instances.values())
        found, costs = balance.move(instances, now, self._config), self._costs(model)
        if found is not None or costs is None:
            return found
        preempted = migration.go_on(instances, costs, now, self._config)
        return preempted or migration.make_room(instances, costs, now, self._config)

    def _carry_out(self, found: balance.Move, now: Seconds) -> None:
        request = self._fleet.requests[found.request.info.request_id]
        source, target = self._fleet.instances[found.source_id], self._fleet.instances[found.target_id]
        self.num_moved += 1
        self.num_migrated += request.has_token
        request.num_moves += 1
        request.moved_at = now
        ids = (request.info.request_id, source.instance_id, source.node.node_id)
        self._agenda.do(AbortSequence(*ids, f"it moves: {found.reason}"))
        self._requests.withdrawn(request, now)
        self._requests.sent(request, target, now)
        priority = dispatch.engine_priority(request.info)
        ids = (request.info.request_id, target.instance_id, target.node.node_id)
        self._agenda.do(Dispatch(*ids, request.attempt, found.reason, priority, request.predicted_tokens))

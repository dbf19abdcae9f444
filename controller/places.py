"""Who gets the places of a model's instances: sent, moved, told to give way, and taken back. Pure.

A request that waits here is sent where a place is free. When none is and it would be late, an answer of a looser class
gives way inside its instance and goes on later (policy/preemption.py). Who waits inside one instance while another has
a place free moves, or whoever can makes room for it (moves.py).
"""

from nearline.controller.actions import Dispatch, YieldPlace
from nearline.controller.agenda import Agenda
from nearline.controller.config import CoreConfig
from nearline.controller.moves import MoveDesk
from nearline.controller.policy import dispatch, preemption
from nearline.controller.policy.agreement import rank
from nearline.controller.queues import RequestRecord
from nearline.controller.requests import RequestDesk
from nearline.controller.state import Fleet, InstanceRecord, ModelRecord
from nearline.protocol import Digest, Seconds, SloClass

_LOOSEST = rank(SloClass.BATCH_1H)


class PlaceDesk:
    """Decides dispatches. Keeps nothing of its own: who runs where stands in the records."""

    def __init__(self, fleet: Fleet, config: CoreConfig, agenda: Agenda, requests: RequestDesk) -> None:
        self._fleet = fleet
        self._config = config
        self._agenda = agenda
        self._requests = requests
        self.moves = MoveDesk(fleet, config, agenda, requests)
        self.num_preempted = 0

    def fill(self, model: ModelRecord, now: Seconds) -> None:
        """Send waiting requests to instances with places left, the one that is due first in front."""
        if not model.instances:
            return
        if model.num_running:
            self._take_back(model, now)
        if model.queue.num_waiting > 1 and model.queue.late_from < now:
            model.queue.set_aside(self._lead_s(model), now)
        while model.queue.num_waiting:
            instances = [i for i in model.instances.values() if dispatch.has_room(i, now, self._config)]
            if not instances or not self._fill_one(model, instances, now):
                break
        if model.queue.num_waiting:
            self._give_way(model, now)
        if len(model.instances) > 1 and model.num_running:
            self.moves.rearrange(model, now)

    def _lead_s(self, model: ModelRecord) -> Seconds:
        """How long before its due date a request must be sent as the next one, to be in time nearly always."""
        wait = model.waits.estimate({}, model.num_running, model.num_places)
        return 0.0 if wait is None else wait.quantile_s(preemption.QUANTILE)

    def _fill_one(self, model: ModelRecord, instances: list[InstanceRecord], now: Seconds) -> bool:
        for request in model.queue.candidates(now):
            choice = dispatch.choose(instances, request, self._config)
            if choice is not None:
                self._send(request, self._fleet.instances[choice.instance_id], choice.reason, now)
                return True
            if dispatch.is_suspect(request, self._config):
                return False  # younger requests wait until an instance is idle, or the suspect would starve
        return False

    def _send(self, request: RequestRecord, instance: InstanceRecord, reason: str, now: Seconds) -> None:
        self._requests.sent(request, instance, now)
        info = request.info
        args = (info.request_id, instance.instance_id, instance.node.node_id, request.attempt)
        self._agenda.do(Dispatch(*args, reason, dispatch.engine_priority(info), request.predicted_tokens))

    def _give_way(self, model: ModelRecord, now: Seconds) -> None:
        """Interrupt answers of looser classes for waiting requests that would be late; look again when one would.

        Who can have nobody give way, or needs it later, stops nobody behind him: he would not get that place.
        """
        wait = model.waits.estimate({}, model.num_running, model.num_places)
        look_at, in_vain = float("inf"), dict[tuple[int, Digest | None], None]()
        for request in model.queue.candidates(now):
            if dispatch.is_suspect(request, self._config):
                break
            strictness = rank(request.info.slo.slo_class)
            needs = strictness, request.info.adapter_digest
            if strictness == _LOOSEST or request.is_late or needs in in_vain:
                continue
            if preemption.is_soon(request.target_s, wait):
                continue
            risk_at = preemption.at_risk_at(request.due_at, request.target_s, wait)
            if now < risk_at:
                look_at = min(look_at, risk_at)
                continue
            chosen = preemption.victim(model.instances.values(), request, model.service_s, now, self._config)
            if chosen is None:
                in_vain[needs] = None
                continue
            self._preempt(self._fleet.requests[chosen.info.request_id], request, now)
        if look_at < float("inf"):
            self._agenda.timers.set(("places", model.name), look_at)

    def _preempt(self, chosen: RequestRecord, urgent: RequestRecord, now: Seconds) -> None:
        assert chosen.instance_id is not None, "only what runs can give way"
        instance = self._fleet.instances[chosen.instance_id]
        self.num_preempted += 1
        chosen.preempted_at = now
        chosen.num_preemptions += 1
        instance.num_preempted += 1
        slo_class = urgent.info.slo.slo_class.value
        reason = f"{urgent.info.request_id} ({slo_class}) is due in {urgent.due_at - now:.1f} s"
        ids = (chosen.info.request_id, instance.instance_id, instance.node.node_id)
        self._agenda.do(YieldPlace(*ids, reason))
        self._send(urgent, instance, f"{chosen.info.request_id} gives it its place", now)

    def _take_back(self, model: ModelRecord, now: Seconds) -> None:
        """Count preempted answers again that go on: a place is free, and nobody stricter waits for it or they waited
        their time. Their engine does the same by itself."""
        for instance in model.instances.values():
            if not instance.num_preempted:
                continue
            preempted = [r for r in instance.in_flight.values() if r.preempted_at is not None]
            for request in sorted(preempted, key=lambda r: (rank(r.info.slo.slo_class), r.preempted_at, r.order)):
                if dispatch.load_of(instance) >= instance.max_running:
                    break
                if self._has_stricter(model, request) and not preemption.is_overdue(request, now, self._config):
                    break
                request.preempted_at = None
                instance.num_preempted -= 1

    def _has_stricter(self, model: ModelRecord, request: RequestRecord) -> bool:
        strictness = rank(request.info.slo.slo_class)
        return any(rank(key.slo_class) < strictness for key in model.queue.busy_groups)

"""The controller's mind: events in, actions out, nothing else. The same object runs live and in the simulator. Pure."""

from nearline.controller.actions import Action, DeleteCheckpoint, WakeAt
from nearline.controller.agenda import Agenda
from nearline.controller.capacity import CapacityDesk
from nearline.controller.choices import LIVE, Choices
from nearline.controller.config import CoreConfig
from nearline.controller.copying import CopyDesk
from nearline.controller.events import (
    AdapterAdded,
    AdapterRemoved,
    CheckpointImported,
    CopyFailed,
    Event,
    FirstToken,
    InstanceChanged,
    MeasurementBegan,
    MeasurementEnded,
    ModelAdded,
    ModelRemoved,
    NodeJoined,
    NodeLost,
    NodeReported,
    PlanSolved,
    RequestArrived,
    RequestCancelled,
    RequestRejected,
    SequenceEnded,
    Woke,
)
from nearline.controller.foresight import ForesightDesk
from nearline.controller.homes import HomeDesk
from nearline.controller.machines import MachineDesk
from nearline.controller.places import PlaceDesk
from nearline.controller.requests import RequestDesk
from nearline.controller.state import Fleet, ModelRecord
from nearline.protocol import Digest, InstanceId, ModelId, ModelSpec, NodeId, RequestId, Seconds


class ControllerCore:
    """Decides for the whole fleet. `on` is the only door through which its state changes.

    Deterministic: the same config and the same (event, now) pairs give the same actions, in any process. `now` never
    goes back. `fleet` may be read by anyone, and is changed only here.
    """

    def __init__(self, config: CoreConfig, choices: Choices = LIVE) -> None:
        self.config = config
        self._choices = choices
        self.fleet = Fleet()
        self._agenda = Agenda()
        self._requests = RequestDesk(self.fleet, config, self._agenda)
        self._machines = MachineDesk(self.fleet, config, self._agenda, self._requests)
        self._copies = CopyDesk(self.fleet, config, self._agenda)
        self._capacity = CapacityDesk(
            self.fleet, config, self._agenda, self._requests, self._machines, choices, self._copies
        )
        self._homes = HomeDesk(self.fleet, config, self._agenda)
        self._places = PlaceDesk(self.fleet, config, self._agenda, self._requests)
        self._foresight = ForesightDesk(self.fleet, config, self._agenda, self._machines, self._capacity)
        self._wake_at: Seconds | None = None

    def on(self, event: Event, now: Seconds) -> list[Action]:
        """Take one event and say what to do. The event counts before timers that are due at the same instant."""
        self._agenda.actions = []
        self._handle(event, now)
        self._run(now)
        self._ask_to_be_woken(now)
        return self._agenda.actions

    def decisions(self) -> dict[str, int]:
        """How often the core did what callers do not see: plans made, bettered by a solver, answered too late by it;
        answers that gave way, requests that moved, and those of them that migrated with tokens."""
        moves = self._places.moves
        made = {"preempted": self._places.num_preempted, "moved": moves.num_moved, "migrated": moves.num_migrated}
        return {**self._capacity.plans(), **made}

    def check(self) -> None:
        """Assert the invariants of the fleet. Raises AssertionError."""
        self.fleet.check()

    def _handle(self, event: Event, now: Seconds) -> None:
        match event:
            case RequestArrived(info):
                self._requests.arrived(info, now)
            case RequestCancelled(request_id, num_generated):
                self._requests.cancelled(request_id, num_generated, now)
            case RequestRejected(request_id, num_generated):
                self._requests.rejected(request_id, num_generated)
            case FirstToken(request_id, attempt):
                self._requests.first_token(request_id, attempt, now)
            case SequenceEnded():
                self._requests.sequence_ended(event, now)
            case InstanceChanged(node_id, status):
                self._machines.instance_changed(node_id, status, now)
                if status.timings is not None:
                    self._copies.started(node_id, status.digest)
            case NodeReported(report):
                self._machines.reported(report, now)
            case NodeJoined(report):
                self._machines.joined(report, now)
            case NodeLost(node_id):
                self._machines.lost(node_id, now)
            case CheckpointImported(node_id, checkpoint):
                self._copies.arrived(node_id, checkpoint.digest)
                self._machines.imported(node_id, checkpoint)
            case CopyFailed():
                self._copies.failed(event, now)
            case MeasurementBegan() | MeasurementEnded():
                self._capacity.measured(event)
            case PlanSolved():
                self._agenda.is_plan_due = self._capacity.solved(event)
            case Woke():
                self._wake_at = None
            case ModelAdded() | ModelRemoved() | AdapterAdded() | AdapterRemoved():
                self._register(event, now)

    def _register(self, event: ModelAdded | ModelRemoved | AdapterAdded | AdapterRemoved, now: Seconds) -> None:
        match event:
            case ModelAdded(spec):
                self._model_added(spec, now)
            case ModelRemoved(model_id):
                self._retire(model_id)
            case AdapterAdded(spec):
                old = self.fleet.put_adapter(spec)
                self.fleet.doomed.pop(spec.checkpoint.digest, None)
                if old is not None and old.checkpoint.digest != spec.checkpoint.digest:
                    self._doom(old.checkpoint.digest)
            case AdapterRemoved(adapter_id):
                gone = self.fleet.drop_adapter(adapter_id)
                if gone is not None:
                    self._doom(gone.checkpoint.digest)

    def _model_added(self, spec: ModelSpec, now: Seconds) -> None:
        """Register a name, or a new version of it: the old one drains, requests that hold its digest still get it."""
        digest = spec.checkpoint.digest
        old = self.fleet.current_model(spec.model_id)
        if old is not None and old.digest != digest:
            self._retire(spec.model_id)
        model = self.fleet.models.get((spec.model_id, digest))
        if model is None:
            queue = self._choices.queue(dict(self.config.tenant_weights))
            model = ModelRecord(spec, queue)
            self.fleet.add_model(model)
            if old is not None:  # a new version answers, and is called, much like the one before it
                model.lengths, model.gaps, model.demand = old.lengths, old.gaps, old.demand
        model.spec, model.is_retired = spec, False
        self.fleet.current[spec.model_id] = digest
        self.fleet.doomed.pop(digest, None)
        model.refresh(now)
        self._agenda.touch(model)

    def _retire(self, model_id: ModelId) -> None:
        model = self.fleet.current_model(model_id)
        if model is not None:
            del self.fleet.current[model_id]
            model.retire()
            self.fleet.doomed[model.digest] = None
            self._agenda.touch(model)

    def _doom(self, digest: Digest) -> None:
        self.fleet.doomed[digest] = None
        for model in self.fleet.models.values():
            model.queue.forget_adapter(digest)
            model.traffic.forget(digest)
        for instance in self.fleet.instances.values():
            instance.forget_adapter(digest)

    def _run(self, now: Seconds) -> None:
        """Settle what was touched, run timers that are due, plan if asked to, until nothing is left to do."""
        agenda = self._agenda
        while True:
            while agenda.touched:
                touched, agenda.touched = agenda.touched, {}
                for model in touched.values():
                    self._settle(model, now)
            timer = agenda.timers.due(now)
            if timer is not None:
                self._time_came(*timer, now)
            elif agenda.is_plan_due:
                agenda.is_plan_due = False
                self._capacity.plan(now)
                self._foresight.look_ahead(now)
            else:
                break
        self._delete_doomed()

    def _settle(self, model: ModelRecord, now: Seconds) -> None:
        if model.key not in self.fleet.models:
            return
        if len(model.instances) > 1 and model.queue.num_waiting:
            self._homes.settle(model, now)
        self._places.fill(model, now)
        model.refresh(now)
        self._capacity.consider(model)
        self._capacity.schedule_idle(model)
        self._foresight.consider(model, now)
        self._homes.prepare(model, now)
        if model.is_retired and not model.queue.num_waiting:
            self._wind_down(model, now)

    def _wind_down(self, model: ModelRecord, now: Seconds) -> None:
        """Stop what a retired version still runs, then forget it."""
        for instance in list(model.instances.values()):
            if instance.is_live and not instance.in_flight:
                self._machines.stop(instance, self.config.stop_drain_s, "its model was removed or replaced", now)
        if not model.instances:
            self.fleet.drop_model(model)
            if model.spec.model_id not in self.fleet.current:
                self.fleet.promises.forget(model.spec.model_id)
            self._capacity.consider(model)

    def _time_came(self, kind: str, name: str, now: Seconds) -> None:
        match kind:
            case "request":
                self._requests.expired(RequestId(name), now)
            case "idle":
                self._capacity.idle_ended(InstanceId(name), now)
            case "stop":
                self._machines.stop_overdue(InstanceId(name), now)
            case "node":
                self._machines.grace_ended(NodeId(name), now)
            case "plan":
                self._agenda.is_plan_due = True
            case "places" | "forecast" | "spare":
                digest, _, model_id = name.partition(" ")
                model = self.fleet.models.get((ModelId(model_id), Digest(digest)))
                if model is not None and kind == "forecast":
                    self._foresight.forecast_came(model, now)
                elif model is not None:
                    self._agenda.touch(model)

    def _delete_doomed(self) -> None:
        if self.fleet.references.freed:
            for digest in self.fleet.references.take_freed():
                if digest in self.fleet.doomed:
                    del self.fleet.doomed[digest]
                    self._agenda.do(DeleteCheckpoint(digest, "nothing registered or running refers to it"))

    def _ask_to_be_woken(self, now: Seconds) -> None:
        at = self._agenda.timers.next_at()
        if at is not None and (self._wake_at is None or at < self._wake_at or self._wake_at <= now):
            self._wake_at = at
            self._agenda.do(WakeAt(at, "the next timer"))

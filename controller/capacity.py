"""Which instances should exist: starts for those who wait, stops for those nobody calls. Pure.

The bound that keeps promises: a model without a slot drains a busy instance once it has waited `max_wait_fraction` of
its class's target, and a busy instance leaves within `swap_drain_s`. So k models that compete for one slot each get it
within k × (wait bound + swap_drain_s + start), however long the streams of the others are; and because an instance
keeps its slot for `residence_factor` × its start, swapping never takes more than a fixed part of the slot's time.
"""

from functools import partial

from nearline.controller.actions import EnsureInstance, Preload
from nearline.controller.agenda import Agenda
from nearline.controller.choices import Choices
from nearline.controller.config import CoreConfig
from nearline.controller.copying import CopyDesk
from nearline.controller.estimate import bytes_by_tier, startup, taken_s
from nearline.controller.events import MeasurementBegan, MeasurementEnded, PlanSolved
from nearline.controller.machines import MachineDesk
from nearline.controller.policy import patience, scaling
from nearline.controller.policy.agreement import rank
from nearline.controller.policy.placement import Need, NoPlace, Placement, place
from nearline.controller.policy.views import InstanceView
from nearline.controller.requests import RequestDesk
from nearline.controller.state import Fleet, InstanceRecord, ModelKey, ModelRecord
from nearline.protocol import InstanceId, InstanceSpec, NodeId, Seconds
from nearline.protocol.errors import ErrorInfo, NodeLost, OutOfMemory, StartTimeout

_STARVED, _BELOW_MINIMUM, _GROWING = range(3)
_PATIENCE_STEP_S = 0.1


class CapacityDesk:
    """Plans starts and stops. Keeps nothing between plans but which models want something."""

    def __init__(
        self,
        fleet: Fleet,
        config: CoreConfig,
        agenda: Agenda,
        requests: RequestDesk,
        machines: MachineDesk,
        choices: Choices,
        copies: CopyDesk,
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._agenda = agenda
        self._requests = requests
        self._machines = machines
        self._choices = choices
        self._adviser = choices.adviser(fleet, config)
        self._copies = copies
        self._wanting: dict[ModelKey, None] = {}
        self.waiting: list[ModelRecord] = []
        """Models that the last plan left without an instance they want, in its order."""
        self._num_instances = 0
        self._replan_at = float("inf")

    def consider(self, model: ModelRecord) -> None:
        """Look at one model after something happened to it; plan if it begins to want an instance."""
        if not self._is_wanting(model):
            self._wanting.pop(model.key, None)
        elif model.key not in self._wanting:
            self._wanting[model.key] = None
            self._agenda.is_plan_due = True

    def schedule_idle(self, model: ModelRecord) -> None:
        """Set the instants at which idle instances of a model have been kept alive long enough."""
        for instance in model.instances.values():
            key = ("idle", instance.instance_id)
            at = scaling.expires_at(instance)
            if at is None:
                self._agenda.timers.drop(key)
            else:
                self._agenda.timers.set(key, at)

    def idle_ended(self, instance_id: InstanceId, now: Seconds) -> None:
        """Stop an instance if it is still idle: an arrival that came first has taken the timer away."""
        instance = self._fleet.instances.get(instance_id)
        at = None if instance is None else scaling.expires_at(instance)
        if instance is None or instance.idle_since is None or at is None or at > now:
            return
        idle_s = now - instance.idle_since
        reason = "its model was removed" if instance.model.is_retired else f"idle for {idle_s:.1f} s"
        self._machines.stop(instance, self._config.stop_drain_s, reason, now)
        self.schedule_idle(instance.model)

    def measured(self, event: MeasurementBegan | MeasurementEnded) -> None:
        """Keep a checkpoint's instances awake while it is measured, though not from those who wait for their slots."""
        for model in self._fleet.models.values():
            if model.digest == event.digest:
                if isinstance(event, MeasurementBegan):
                    model.measurements[event.task_id] = None
                else:
                    model.measurements.pop(event.task_id, None)
                self._agenda.touch(model)

    def plan(self, now: Seconds) -> None:
        """Give every model that wants an instance the best place there is, the most urgent model first."""
        if not self._wanting:  # an instance became idle, and nobody waits for its slot: the usual case
            self.waiting = []
            self._agenda.timers.drop(("plan", ""))
            return
        claimed: dict[InstanceId, None] = {}
        self._replan_at = float("inf")
        models = self._in_order(now)
        if (wish := self._adviser.take_wish()) is not None:
            self._agenda.do(wish)
        for model in models:
            while self._is_wanting(model) and self._try(model, claimed, now):
                pass
            self.consider(model)
        self.waiting = [model for model in models if model.key in self._wanting]
        if self._replan_at < float("inf"):
            self._agenda.timers.set(("plan", ""), self._replan_at)
        else:
            self._agenda.timers.drop(("plan", ""))

    def prepare(self, model: ModelRecord, reason: str, now: Seconds) -> bool:
        """Start an instance nobody waits for yet, if a slot stands free. True if it was started."""
        need = self._need(model)
        found = self._choices.place(self._fleet.nodes.values(), need, now, self._config, lambda _: False, ())
        is_free = isinstance(found, Placement) and not found.leaving
        if is_free and isinstance(found, Placement):
            self._start(model, found, reason, now)
        return is_free

    def plans(self) -> dict[str, int]:
        """Plans made, those that a solver bettered, and its answers that came too late."""
        adviser = self._adviser
        return {"planned": adviser.num_plans, "bettered": adviser.num_better, "late": adviser.num_late}

    def solved(self, answer: PlanSolved) -> bool:
        """Take the solver's answer. True if the order of models changes by it."""
        return self._adviser.solved(answer)

    def _in_order(self, now: Seconds) -> list[ModelRecord]:
        """All models that want an instance: the starved ones as advised, then the others."""
        models = sorted([self._fleet.models[key] for key in self._wanting], key=self._urgency)
        starved = [model for model in models if model.starved_since is not None]
        return self._adviser.order(starved, now) + models[len(starved) :]

    def _is_wanting(self, model: ModelRecord) -> bool:
        if model.key not in self._fleet.models:
            return False
        if not model.queue.num_waiting and model.num_live >= model.spec.min_replicas:
            return False  # the usual case, without a reason put into words
        return scaling.wanted(model, self._config).num_replicas > model.num_live

    def _urgency(self, model: ModelRecord) -> tuple[int, Seconds, ModelKey]:
        if model.starved_since is not None:
            return (_STARVED, model.starved_since + model.queue.shortest_target_s(), model.key)
        kind = _BELOW_MINIMUM if model.num_live < model.spec.min_replicas else _GROWING
        return (kind, 0.0, model.key)

    def _try(self, model: ModelRecord, claimed: dict[InstanceId, None], now: Seconds) -> bool:
        """Take one step towards one more instance. True if an instance was started."""
        if model.retry_at > now:
            model.wait_reason = f"the last start failed; the next try is in {model.retry_at - now:.1f} s"
            self._replan_by(model.retry_at)
            return False
        may_stop = partial(self._may_stop, model, self._max_wait_s(model), now)
        need = self._need(model)
        found = self._choices.place(self._fleet.nodes.values(), need, now, self._config, may_stop, claimed)
        if isinstance(found, NoPlace):
            self._no_place(model, need, found, now)
            return False
        model.unplaceable_since = None
        soon = self._soon(model, need, found, now)
        if soon is not None:
            near = [self._fleet.nodes[soon.node_id]]
            found = self._choices.place(near, need, now, self._config, may_stop, claimed)
            if isinstance(found, NoPlace):
                return False
        model.wait_reason = found.reason
        for instance_id in found.victims:
            instance = self._fleet.instances[instance_id]
            reason = f"{model.spec.model_id} waits: {self._why(instance, now)}"
            self._machines.stop(instance, self._drain_s(model, instance), reason, now)
        if found.leaving:
            claimed.update(dict.fromkeys(found.leaving))
            self._preload(model, found)
            return False
        self._start(model, found, scaling.wanted(model, self._config).reason, now)
        return True

    def _drain_s(self, model: ModelRecord, instance: InstanceRecord) -> Seconds:
        """How long a victim's sequences may go on: not at all if they are all of looser classes than who waits, and
        were not interrupted too often. They keep their tokens and wait for another place."""
        strictness = min((rank(key.slo_class) for key in model.queue.busy_groups), default=0)
        limit = self._config.max_preemptions
        running = instance.in_flight.values()
        can_yield = all(rank(r.info.slo.slo_class) > strictness and r.num_losses < limit for r in running)
        return 0.0 if running and can_yield else self._config.swap_drain_s

    def _soon(self, model: ModelRecord, need: Need, found: Placement, now: Seconds) -> patience.Soon | None:
        """Name the slot near its bytes that a model should rather have. A place that costs nobody anything ends the
        wait for it once the model has waited its bound."""
        if model.starved_since is None:
            return None
        max_wait_s, config = self._max_wait_s(model), self._config
        bound_at = model.starved_since + max_wait_s
        node = self._fleet.nodes[found.node_id]
        if now >= bound_at and not found.leaving and not taken_s(node, need.digest, need.num_bytes):
            return None
        free_at = partial(patience.free_at, now=now, config=config, max_wait_s=max_wait_s, bound_at=bound_at)
        soon = self._choices.worth_waiting(self._fleet.nodes.values(), need, found, free_at, now)
        if soon is not None:
            model.wait_reason = f"a slot on {soon.node_id}, which has its bytes in DRAM, is sooner than reading"
            self._replan_by(max(soon.at if now >= bound_at else min(soon.at, bound_at), now + _PATIENCE_STEP_S))
        return soon

    def _need(self, model: ModelRecord) -> Need:
        groups = model.queue.ordered_groups()
        adapter_digest = groups[0].key.adapter_digest if groups else None
        gain, crowded = model.sharing.gain, list[tuple[NodeId, int]]()
        if gain is not None and gain < self._config.min_sharing_gain:
            crowded = [(i.node.node_id, i.spec.device_index) for i in model.instances.values() if i.is_live]
        return Need(model.digest, model.num_bytes, adapter_digest, tuple(model.failed_nodes), crowded)

    def _start(self, model: ModelRecord, found: Placement, why: str, now: Seconds) -> None:
        self._num_instances += 1
        node, short_name = self._fleet.nodes[found.node_id], model.spec.model_id.rsplit("/", 1)[-1]
        instance_id = InstanceId(f"{short_name}.{self._config.epoch}.{self._num_instances}")
        spec = InstanceSpec(instance_id, model.spec.model_id, model.digest, found.device_index)
        parts = startup(node, model.digest, model.num_bytes, now)
        reason = f"{why}; {found.reason}"
        instance = self._machines.ensure(model, node, spec, now)
        instance.estimate_s = parts.total_s
        if parts.queue_s + parts.read_s > 0:
            node.storage_free_at = max(now, node.storage_free_at) + parts.read_s
        model.preloading_on = None
        self._agenda.do(EnsureInstance(spec, node.node_id, parts.total_s, reason))
        self._agenda.touch(model)

    def _preload(self, model: ModelRecord, found: Placement) -> None:
        """Use the time until the slot is free: bring the bytes into DRAM, if there is room that nobody else needs."""
        node = self._fleet.nodes[found.node_id]
        _, ssd, remote = bytes_by_tier(node, model.digest, model.num_bytes)
        if model.preloading_on == node.node_id or ssd + remote == 0 or node.report.dram_free_bytes < ssd + remote:
            return
        model.preloading_on = node.node_id
        self._agenda.do(Preload(node.node_id, model.digest, f"{model.spec.model_id} starts there: {found.reason}"))

    def _no_place(self, model: ModelRecord, need: Need, found: NoPlace, now: Seconds) -> None:
        """Have a place made, if one can be; else refuse who waits. While bytes come `start_timeout` bounds the wait."""
        is_held = not found.is_hopeless and self._is_held(model, need, now)
        if is_held:
            found = NoPlace("minimum replicas of other models hold every slot on the nodes with its bytes")
        model.wait_reason = found.reason
        if model.num_live < model.spec.min_replicas or is_held or (not found.is_hopeless and self._is_late(model, now)):
            model.wait_reason = self._copies.bring(model, need, found, now)
        if not (found.is_hopeless or is_held) or self._copies.is_coming(model.digest, now):
            model.unplaceable_since = None
            return
        if model.unplaceable_since is None:
            model.unplaceable_since = now
        bound_s = self._config.unplaceable_timeout_s
        until = max(model.unplaceable_since, model.starved_since or 0.0) + bound_s
        text = f"model {model.spec.model_id!r} cannot run: {model.wait_reason}"
        if found.is_too_big:
            text = f"{found.reason}; give a node more memory (`--pool-bytes`) or use a smaller model"
            self._requests.reject_waiting(model, ErrorInfo.of(OutOfMemory(text)), "fits on no node", now)
        elif now < until:
            self._replan_by(until)
            return
        elif is_held:
            held = StartTimeout(f"{text}; lower a `min_replicas` or add a node", retry_after_s=bound_s)
            self._requests.reject_waiting(model, ErrorInfo.of(held), "minimums of others for too long", now)
        else:
            lost = NodeLost(f"{text}; start or reconnect a node that can", retry_after_s=bound_s)
            self._requests.reject_waiting(model, ErrorInfo.of(lost), "no node for too long", now)
        model.unplaceable_since = None

    def _is_late(self, model: ModelRecord, now: Seconds) -> bool:
        return model.starved_since is not None and now >= model.starved_since + self._max_wait_s(model)

    def _is_held(self, model: ModelRecord, need: Need, now: Seconds) -> bool:
        """Whether who waits would wait for ever: nothing near its bytes leaves but what minimums of others keep."""
        has_minimums = any(instance.model.spec.min_replicas for instance in self._fleet.instances.values())
        if model.starved_since is None or not has_minimums:
            return False
        return isinstance(place(self._fleet.nodes.values(), need, now, self._config, _is_above_minimum), NoPlace)

    def _may_stop(self, model: ModelRecord, max_wait_s: Seconds, now: Seconds, instance: InstanceView) -> bool:
        """Whether an instance may give up its slot for a model. Where the answer is 'not yet', plan again then.

        Growth takes nobody's slot. A minimum takes idle instances. A starved model takes idle instances after their
        residence, spare replicas, and after its wait bound any busy one. Minimums of others are respected.
        """
        other, starved_since = instance.model, model.starved_since
        if instance.loaded_at is None or (other.spec.model_id == model.spec.model_id and not other.is_retired):
            return False
        is_busy = bool(instance.in_flight or other.queue.num_waiting)
        if starved_since is None and (is_busy or model.num_live >= model.spec.min_replicas):
            return False
        if not _is_above_minimum(instance):
            return False
        allowed_at = scaling.residence_ends_at(instance, self._config, max_wait_s)
        if is_busy and starved_since is not None and other.num_live == 1:
            allowed_at = max(allowed_at, starved_since + max_wait_s)
        if allowed_at > now:
            self._replan_by(allowed_at)
            return False
        return True

    def _replan_by(self, at: Seconds) -> None:
        self._replan_at = min(self._replan_at, at)

    def _max_wait_s(self, model: ModelRecord) -> Seconds:
        if model.starved_since is None:
            return 0.0
        return self._config.max_wait_fraction * model.queue.shortest_target_s()

    def _why(self, instance: InstanceRecord, now: Seconds) -> str:
        if instance.idle_since is not None:
            return f"this instance is idle for {now - instance.idle_since:.1f} s"
        return f"this instance has {len(instance.in_flight)} requests in flight and had its turn"


def _is_above_minimum(instance: InstanceView) -> bool:
    return instance.model.num_live > instance.model.spec.min_replicas

"""The node's mind: what should run against what runs. Pure: events and `now` in, actions out.

Owns the table of instances and of engine processes. A slot and a pin belong to an instance from the grant until no
process maps its frames, so STOPPED means that memory is free. FAILED is said at once; its slot follows when the process
is gone.
"""

from collections.abc import Callable
from typing import Any

from nearline.node_agent import actions as act
from nearline.node_agent import events as ev
from nearline.node_agent.budget import instance_budget, instance_threads
from nearline.node_agent.lifecycle import LifecycleEvent, is_final, next_state
from nearline.node_agent.pace import Pace
from nearline.node_agent.roster import Roster
from nearline.node_agent.supply import Demand, backoff_s, supply
from nearline.node_agent.types import CoreConfig, DeviceSlots, Engine, EngineState, Instance
from nearline.protocol import Digest, InstanceId, InstanceState, InstanceStatus, ModelId, Seconds
from nearline.protocol.errors import ErrorInfo, InstanceFailed, NearlineError, StartTimeout

BIND_GUESS_S, PROCESS_GUESS_S = 0.05, 4.0


class NodeCore:
    """Decides which instance runs in which process. Every change enters through `on`."""

    def __init__(self, config: CoreConfig) -> None:
        self.bind_pace, self.process_pace = Pace(BIND_GUESS_S), Pace(PROCESS_GUESS_S)
        self._config = config
        self._roster = Roster(config.devices)
        self._deleting: dict[Digest, None] = {}
        self._actions: list[act.NodeAction] = []
        self._looks: list[Seconds] = []
        self._handlers: dict[type, Callable[[Any, Seconds], None]] = {
            ev.EnsureWished: self._on_ensure,
            ev.StopWished: self._on_stop,
            ev.DeleteWished: lambda event, _now: self._deleting.update({event.digest: None}),
            ev.DeleteUnwished: lambda event, _now: self._deleting.pop(event.digest, None),
            ev.LinkLost: lambda _event, _now: self._actions.append(act.AbortSequences()),
            ev.BytesMoved: self._on_bytes_moved,
            ev.LeaseAcquired: self._on_lease_acquired,
            ev.LeaseRefused: self._on_lease_refused,
            ev.LeaseFilled: self._on_lease_filled,
            ev.LeaseBroken: self._on_lease_broken,
            ev.ActionFailed: self._on_action_failed,
            ev.Drained: self._on_drained,
            ev.Woke: lambda _event, now: self._on_deadlines(now),
            ev.EngineWarm: self._on_engine_warm,
            ev.EngineBound: self._on_engine_bound,
            ev.EngineBindFailed: self._on_bind_failed,
            ev.EngineUnbound: self._on_engine_unbound,
            ev.EngineExited: self._on_engine_exited,
            ev.AdapterChanged: self._on_adapter_changed,
        }

    def on(self, event: ev.NodeEvent, now: Seconds) -> list[act.NodeAction]:
        """Take one event and decide. Woke without news starts the first processes."""
        self._actions, self._looks = [], []
        self._handlers[type(event)](event, now)
        self._grant_slots(now)
        self._bind_idle(now)
        self._supply_engines(now)
        self._delete_unused()
        self._roster.forget_old()
        deadlines = [*self._looks, *self._roster.deadlines()]
        if deadlines:
            self._actions.append(act.WakeAt(min(deadlines)))
        return self._actions

    def state(self, instance_id: InstanceId) -> InstanceState | None:
        """Give an instance's state, None if it is unknown."""
        instance = self._roster.instances.get(instance_id)
        return instance.state if instance else None

    def statuses(self) -> list[InstanceStatus]:
        """Describe the instances that have not ended."""
        return [i.status() for i in self._roster.instances.values() if not is_final(i.state)]

    def check(self) -> None:
        """Assert the invariants between instances, processes, slots and pins."""
        self._roster.check()

    @property
    def num_prewarmed(self) -> int:
        return sum(e.state is EngineState.IDLE for e in self._roster.engines.values())

    # ---- wishes ----

    def _on_ensure(self, event: ev.EnsureWished, now: Seconds) -> None:
        spec = event.spec
        known = self._roster.instances.get(spec.instance_id)
        if known:
            self._actions.append(act.SendStatus(known.status()))
            return
        instance = self._roster.instances[spec.instance_id] = Instance(spec, event.checkpoint)
        try:
            instance.max_running = self._roster.max_running(instance, self._config)
        except NearlineError as refusal:
            self._fail(instance, ErrorInfo.of(refusal))
            return
        self._deleting.pop(spec.digest, None)
        self._actions.append(act.SendStatus(instance.status()))

    def _on_stop(self, event: ev.StopWished, now: Seconds) -> None:
        instance = self._roster.instances.get(event.instance_id)
        if instance is None:
            unknown = InstanceStatus(event.instance_id, ModelId(""), Digest(""), InstanceState.STOPPED)
            self._actions.append(act.SendStatus(unknown))
        elif is_final(instance.state):
            self._actions.append(act.SendStatus(instance.status()))
        elif instance.state is InstanceState.DRAINING:
            if instance.drain_deadline is not None:
                instance.drain_deadline = min(instance.drain_deadline, now + event.drain_s)
        else:
            self._stop(instance, now, event.drain_s)

    def _stop(self, instance: Instance, now: Seconds, drain_s: Seconds) -> None:
        was = instance.state
        if was in (InstanceState.PENDING, InstanceState.STARTING):
            self._release(instance)
        self._move(instance, LifecycleEvent.STOP_WISHED)
        if was is InstanceState.LOADING:
            engine = self._roster.engine_of(instance)
            engine.deadline = min(engine.deadline or now, now + self._config.unbind_timeout_s)
        elif was is InstanceState.READY:
            instance.drain_deadline = now + drain_s
            self._actions.append(act.AwaitDrain(instance.spec.instance_id))

    def _delete_unused(self) -> None:
        for digest in list(self._deleting):
            if not self._roster.is_in_use(digest):
                del self._deleting[digest]
                self._actions.append(act.DeleteCheckpoint(digest))

    # ---- bytes ----

    def _on_bytes_moved(self, event: ev.BytesMoved, now: Seconds) -> None:
        instance = self._roster.instances.get(event.instance_id)
        if instance and instance.bytes_deadline is not None:
            instance.bytes_deadline = now + self._config.bytes_timeout_s

    def _on_lease_acquired(self, event: ev.LeaseAcquired, now: Seconds) -> None:
        instance = self._roster.instances.get(event.instance_id)
        if instance and instance.state is InstanceState.STARTING:
            instance.has_frames, instance.bytes_deadline = True, None

    def _on_lease_refused(self, event: ev.LeaseRefused, now: Seconds) -> None:
        instance = self._roster.instances.get(event.instance_id)
        if instance and instance.state is InstanceState.STARTING:
            instance.is_pinned = False
            self._fail(instance, event.error)

    def _on_lease_filled(self, event: ev.LeaseFilled, now: Seconds) -> None:
        instance = self._roster.instances.get(event.instance_id)
        if instance is None or is_final(instance.state):
            return
        instance.is_filled = True
        instance.read_s, instance.read_bytes, instance.tier = event.read_s, event.read_bytes, event.tier
        if instance.bind_s is not None:
            self._actions.append(act.SendStatus(instance.status()))

    def _on_lease_broken(self, event: ev.LeaseBroken, now: Seconds) -> None:
        instance = self._roster.instances.get(event.instance_id)
        if instance and not is_final(instance.state):
            self._fail(instance, event.error)

    # ---- draining ----

    def _on_drained(self, event: ev.Drained, now: Seconds) -> None:
        instance = self._roster.instances.get(event.instance_id)
        if instance and instance.state is InstanceState.DRAINING and instance.drain_deadline is not None:
            self._unbind(instance, now)

    def _unbind(self, instance: Instance, now: Seconds) -> None:
        instance.drain_deadline = None
        engine = self._roster.engine_of(instance)
        engine.state = EngineState.UNBINDING
        engine.deadline = now + self._config.unbind_timeout_s
        self._actions.append(act.UnbindEngine(engine.engine_id))

    def _on_deadlines(self, now: Seconds) -> None:
        for instance in list(self._roster.instances.values()):
            if instance.bytes_deadline is not None and instance.bytes_deadline <= now:
                text = f"{instance.spec.model_id}: nothing of it came for {self._config.bytes_timeout_s:g} s; try again"
                self._fail(instance, ErrorInfo.of(StartTimeout(text)))
            if instance.drain_deadline is not None and instance.drain_deadline <= now:
                text = f"instance {instance.spec.instance_id} stopped before the end; run it elsewhere"
                self._actions.append(act.FailSequences(instance.spec.instance_id, ErrorInfo.of(InstanceFailed(text))))
                self._unbind(instance, now)
        for engine in list(self._roster.engines.values()):
            if engine.deadline is not None and engine.deadline <= now:
                self._give_up(engine)

    def _give_up(self, engine: Engine) -> None:
        waited = engine.state
        instance = self._roster.instance_of(engine)
        if instance and instance.state is InstanceState.LOADING:
            limit = self._config.bind_timeout_s
            late = StartTimeout(f"{instance.spec.model_id}: its process did not bind within {limit:g} s; try again")
            self._fail(instance, ErrorInfo.of(late))
        else:
            engine.is_faulty = waited is EngineState.STARTING
            self._kill(engine, f"no answer while {waited}")

    # ---- processes ----

    def _on_engine_warm(self, event: ev.EngineWarm, now: Seconds) -> None:
        engine = self._roster.engines[event.engine_id]
        if engine.state is not EngineState.STARTING:
            return
        engine.state, engine.deadline, engine.warm_at = EngineState.IDLE, None, now
        self.process_pace.observe(now - engine.started_at)

    def _on_engine_bound(self, event: ev.EngineBound, now: Seconds) -> None:
        engine = self._roster.engines[event.engine_id]
        if engine.state is not EngineState.BINDING or engine.instance_id != event.instance_id:
            return
        instance = self._roster.instances[event.instance_id]
        engine.state, engine.deadline = EngineState.BOUND, None
        self._roster.devices[engine.device_index].num_failures = 0
        self.bind_pace.observe(event.bind_s)
        instance.bind_s, instance.kv_tokens_total = event.bind_s, event.kv_tokens_total
        if instance.state is InstanceState.DRAINING:
            self._unbind(instance, now)
        else:
            self._move(instance, LifecycleEvent.BOUND)

    def _on_bind_failed(self, event: ev.EngineBindFailed, now: Seconds) -> None:
        """A bind failed, or a bound engine found its bytes to be bad."""
        engine = self._roster.engines[event.engine_id]
        if engine.instance_id != event.instance_id or engine.state is EngineState.EXITING:
            return
        # What half a bind left in the process is unknown, so the process is not used again.
        instance = self._roster.instances[event.instance_id]
        self._fail_or_end(instance, engine, event.error)

    def _on_action_failed(self, event: ev.ActionFailed, now: Seconds) -> None:
        instance = self._roster.instances.get(event.instance_id)
        if instance and not is_final(instance.state):
            engine = None if instance.engine_id is None else self._roster.engine_of(instance)
            self._fail_or_end(instance, engine, event.error)

    def _fail_or_end(self, instance: Instance, engine: Engine | None, error: ErrorInfo) -> None:
        if engine and instance.state is InstanceState.DRAINING:
            self._kill(engine, "it failed, and nobody wants the instance any more")
        else:
            self._fail(instance, error)

    def _on_engine_unbound(self, event: ev.EngineUnbound, now: Seconds) -> None:
        engine = self._roster.engines[event.engine_id]
        if engine.state is EngineState.UNBINDING:
            engine.state, engine.deadline = EngineState.IDLE, None
            self._roster.devices[engine.device_index].quiet_at = now + self._config.quiet_delay_s
            self._part(engine)

    def _on_engine_exited(self, event: ev.EngineExited, now: Seconds) -> None:
        engine = self._roster.engines[event.engine_id]
        instance = self._roster.instance_of(engine)
        is_failure = engine.is_faulty or engine.state is not EngineState.EXITING
        engine.state, engine.deadline = EngineState.EXITING, None
        if instance and not is_final(instance.state):
            self._lose(instance, event.how)
        self._part(engine)
        del self._roster.engines[event.engine_id]
        if is_failure:
            self._count_failure(self._roster.devices[engine.device_index], event.how, now)

    def _lose(self, instance: Instance, how: str) -> None:
        """Its process ended: an instance that was stopping has stopped, any other has failed."""
        gone = ErrorInfo.of(InstanceFailed(f"the engine process of {instance.spec.model_id} ended ({how})"))
        self._actions.append(act.FailSequences(instance.spec.instance_id, gone))
        if instance.state is not InstanceState.DRAINING:
            instance.error = gone
            self._move(instance, LifecycleEvent.FAILED)

    def _count_failure(self, device: DeviceSlots, how: str, now: Seconds) -> None:
        device.num_failures += 1
        device.retry_at = now + backoff_s(device.num_failures, self._config)
        if device.num_failures < self._config.max_start_failures:
            return
        times = f"{device.num_failures} times in a row (last: {how})"
        error = InstanceFailed(f"engine processes of this node end {times}; its engine logs say why")
        for instance in self._roster.hungry(device):
            self._fail(instance, ErrorInfo.of(error))

    def _on_adapter_changed(self, event: ev.AdapterChanged, now: Seconds) -> None:
        instance = self._roster.instances.get(event.instance_id)
        if instance is None or is_final(instance.state):
            return
        if event.is_loaded:
            instance.adapters[event.digest] = None
        else:
            instance.adapters.pop(event.digest, None)
        self._actions.append(act.SendStatus(instance.status()))

    # ---- moves ----

    def _move(self, instance: Instance, event: LifecycleEvent) -> None:
        instance.state = next_state(instance.state, event)
        self._actions.append(act.SendStatus(instance.status()))

    def _fail(self, instance: Instance, error: ErrorInfo) -> None:
        """Say FAILED now; the slot and the pin follow when no process maps the frames."""
        error = error.while_serving(instance.spec.digest)
        instance.error, instance.drain_deadline = error, None
        if instance.engine_id is None:
            self._release(instance)
        else:
            self._actions.append(act.FailSequences(instance.spec.instance_id, error))
            self._kill(self._roster.engine_of(instance), f"its instance failed: {error.code}")
        self._move(instance, LifecycleEvent.FAILED)

    def _kill(self, engine: Engine, reason: str) -> None:
        if engine.state is not EngineState.EXITING:
            engine.state, engine.deadline = EngineState.EXITING, None
            self._actions.append(act.KillEngine(engine.engine_id, reason))

    def _part(self, engine: Engine) -> None:
        """Separate a process that maps no frames any more from its instance."""
        instance = self._roster.instance_of(engine)
        if instance is None:
            return
        engine.instance_id = instance.engine_id = instance.drain_deadline = None
        self._release(instance)
        if instance.state is InstanceState.DRAINING:
            self._move(instance, LifecycleEvent.RELEASED)

    def _release(self, instance: Instance) -> None:
        if instance.is_pinned:
            self._actions.append(act.ReleaseCheckpoint(instance.spec.instance_id))
        instance.is_pinned = instance.has_slot = instance.has_frames = False
        instance.bytes_deadline = None

    # ---- matching instances, slots and processes ----

    def _grant_slots(self, now: Seconds) -> None:
        for instance in self._roster.instances.values():
            device = self._roster.devices.get(instance.spec.device_index)
            if instance.state is not InstanceState.PENDING or not device or not self._roster.num_free_slots(device):
                continue
            instance.has_slot = instance.is_pinned = True
            instance.granted_at, instance.bytes_deadline = now, now + self._config.bytes_timeout_s
            self._move(instance, LifecycleEvent.SLOT_GRANTED)
            may_stream = device.info.weight_bytes > 0
            self._actions.append(act.AcquireCheckpoint(instance.spec.instance_id, instance.spec.digest, may_stream))

    def _bind_idle(self, now: Seconds) -> None:
        for device in self._roster.devices.values():
            for instance in self._roster.hungry(device):
                idle = self._roster.engines_in(device, EngineState.IDLE)
                if idle and instance.has_frames:
                    self._bind(instance, idle[0], device, now)

    def _bind(self, instance: Instance, engine: Engine, device: DeviceSlots, now: Seconds) -> None:
        assert instance.checkpoint is not None, "an instance without a checkpoint has failed"
        engine.state, engine.instance_id = EngineState.BINDING, instance.spec.instance_id
        engine.deadline = now + self._config.bind_timeout_s
        instance.engine_id = engine.engine_id
        instance.is_prewarmed = engine.warm_at is not None and engine.warm_at <= instance.granted_at
        instance.process_s = 0.0 if instance.is_prewarmed else now - instance.granted_at
        device.quiet_at = now + self._config.quiet_delay_s
        budget = instance_budget(instance.checkpoint, device.info, self._config.kv_bytes, self._config.max_running)
        num_busy = device.info.num_slots - self._roster.num_free_slots(device)
        num_threads = instance_threads(self._config.num_cores, num_busy)
        self._move(instance, LifecycleEvent.BIND_SENT)
        bind = act.BindEngine(engine.engine_id, instance.spec, budget.kv_bytes, budget.max_running, num_threads)
        self._actions.append(bind)

    def _supply_engines(self, now: Seconds) -> None:
        for device in self._roster.devices.values():
            idle = self._roster.engines_in(device, EngineState.IDLE)
            demand = Demand(
                num_hungry=len(self._roster.hungry(device)),
                num_starting=len(self._roster.engines_in(device, EngineState.STARTING)),
                num_idle=len(idle),
                num_free_slots=self._roster.num_free_slots(device),
            )
            decision = supply(demand, device, self._config, now)
            for _ in range(decision.num_starts):
                self._start_engine(device, decision.reason, now)
            for engine in idle[: decision.num_ends]:
                self._kill(engine, decision.reason)
            if decision.look_at is not None:
                self._looks.append(decision.look_at)

    def _start_engine(self, device: DeviceSlots, reason: str, now: Seconds) -> None:
        engine = self._roster.add_engine(device.info.index, now, self._config)
        self._actions.append(act.StartEngine(engine.engine_id, device.info.index, reason))

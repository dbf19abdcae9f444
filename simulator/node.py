"""A simulated machine: the node agent's own mind over simulated processes, storage and engines.

Which process binds what, what waits for a slot and how an instance drains is decided by NodeCore, as it is live; this
file answers its actions after what the cost model says.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from nearline.controller.events import Event, InstanceChanged, NodeReported, SequenceEnded
from nearline.node_agent import actions as act
from nearline.node_agent import events as ev
from nearline.node_agent.core import NodeCore
from nearline.node_agent.pace import Pace
from nearline.node_agent.types import CoreConfig, EngineId
from nearline.protocol import (
    CheckpointInfo,
    CheckpointKind,
    DeviceInfo,
    Digest,
    FinishReason,
    InstanceId,
    InstanceSpec,
    InstanceState,
    InstanceStatus,
    NodeId,
    NodeReport,
    RequestId,
    Seconds,
    StepTimeModel,
    Tier,
    TierBandwidth,
)
from nearline.protocol.errors import ErrorInfo, NearlineError
from nearline.simulator.cores import SharedCores
from nearline.simulator.cost_model import Machine, SimulatedModel
from nearline.simulator.engines import EnginePorts, PacedEngine, Schedule, SimulatedEngine, SimulatedSequence
from nearline.simulator.memory import NodeMemory, Read

MakeEngine = Callable[[EnginePorts, Machine, StepTimeModel, Digest], SimulatedEngine]
_SETTLES_AFTER_S = 1.0
"""An engine that had no work for so long does what it has to do once per bind, as a live one."""
_REPORT_SOON_S = 0.1
"""Changes within this time share one report, as on a live node."""


def paced(ports: EnginePorts, machine: Machine, steps: StepTimeModel, digest: Digest) -> SimulatedEngine:
    """The engine of large fleets."""
    return PacedEngine(ports, machine.cost, steps)


class _Instance:
    """What stands behind one instance: its pin, its engine, and which of bytes and binding are still missing."""

    def __init__(self, spec: InstanceSpec, engine: SimulatedEngine) -> None:
        self.spec, self.engine = spec, engine
        self.read: Read | None = None
        self.num_submitted = 0
        self.is_settled = False
        self.busy_until: Seconds = 0.0
        self.is_filled = self.is_bound = self.is_draining = self.has_ended = False


class SimulatedNode:
    """Calls `post` with events, and `schedule(delay, function, *arguments)` for what happens later."""

    def __init__(
        self,
        node_id: NodeId,
        machine: Machine,
        models: Mapping[Digest, SimulatedModel],
        make_engine: MakeEngine = paced,
    ) -> None:
        self.node_id = node_id
        self.machine = machine
        self.starts_by_tier: dict[Tier, int] = {}
        self.num_swaps = 0
        self.is_up = True
        self._models = models
        self._make_engine = make_engine
        self._memory = NodeMemory(machine, models)
        self._free_slots: list[Digest | None] = [None] * (machine.num_slots * machine.num_devices)
        memory_bytes = machine.weight_bytes or machine.dram_bytes
        self._devices = tuple(
            DeviceInfo(index, "simulated", "simulated", memory_bytes, machine.num_slots, machine.weight_bytes)
            for index in range(machine.num_devices)
        )
        self._handlers: dict[type, Callable[..., None]] = {
            act.StartEngine: self._start,
            act.BindEngine: self._bind,
            act.UnbindEngine: self._unbind,
            act.KillEngine: lambda a: self._later(machine.cost.stop_s, ev.EngineExited(a.engine_id, a.reason)),
            act.AcquireCheckpoint: self._acquire,
            act.ReleaseCheckpoint: self._release,
            act.SendStatus: lambda a: self._changed(a.status),
            act.AwaitDrain: self._await_drain,
            act.FailSequences: self._fail_sequences,
            act.WakeAt: self._wake_at,
        }

    def connect(self, clock: Callable[[], Seconds], schedule: Schedule, post: Callable[[Event], None]) -> None:
        """Switch the machine on; its spare processes are warm."""
        self._clock, self._schedule, self._post = clock, schedule, post
        self._boot()

    def report(self) -> NodeReport:
        """What the node says of itself now."""
        cost, machine, core = self.machine.cost, self.machine, self._core
        return NodeReport(
            node_id=self.node_id,
            http_url="",
            devices=self._devices,
            dram_pool_bytes=machine.dram_bytes // machine.frame_bytes * machine.frame_bytes,
            dram_frame_bytes=machine.frame_bytes,
            dram_free_bytes=self._memory.free_bytes,
            ssd_budget_bytes=1 << 50,
            ssd_free_bytes=0,
            bandwidths=(TierBandwidth(Tier.SSD, cost.ssd_bytes_per_s), TierBandwidth(Tier.DRAM, cost.dram_bytes_per_s)),
            bind_s=core.bind_pace.value_s,
            process_s=core.process_pace.value_s,
            num_prewarmed=core.num_prewarmed,
            residency=self._memory.residency(),
            instances=tuple(core.statuses()),
        )

    def ensure(self, spec: InstanceSpec) -> None:
        if not self.is_up:
            return
        if spec.instance_id not in self._instances:
            steps = self._models[spec.digest].steps or self.machine.cost.steps
            emptied = partial(self._emptied, spec.instance_id)
            compute = partial(self._compute, spec.instance_id)
            ports = EnginePorts(self._clock, self._schedule, compute, self._post, emptied)
            engine = self._make_engine(ports, self.machine, steps, spec.digest)
            self._instances[spec.instance_id] = _Instance(spec, engine)
        self._on(ev.EnsureWished(spec, _checkpoint(spec.digest, self._models[spec.digest].num_bytes)))

    def stop(self, instance_id: InstanceId, drain_s: Seconds) -> None:
        if self.is_up:
            self._on(ev.StopWished(instance_id, drain_s))

    def preload(self, digest: Digest) -> None:
        if not self.is_up:
            return
        try:
            read = self._memory.pin(digest, self._clock())
        except NearlineError:
            return  # no room beside what runs; the start will find another way
        self._schedule(read.seconds, self._preloaded, digest, read, self._core)

    def submit(self, instance_id: InstanceId, sequence: SimulatedSequence) -> None:
        instance = self._instances.get(instance_id)
        if instance is not None:  # else lost with the node, which the controller has been told
            instance.num_submitted += 1
            instance.engine.submit(sequence)

    def yield_place(self, instance_id: InstanceId, request_id: RequestId) -> None:
        instance = self._instances.get(instance_id)
        if instance is not None:
            instance.engine.yield_place(request_id)

    def abort(self, instance_id: InstanceId, request_id: RequestId) -> None:
        instance = self._instances.get(instance_id)
        if instance is not None:
            instance.engine.abort(request_id)

    def num_generated(self, instance_id: InstanceId, request_id: RequestId) -> int | None:
        """Tokens that a sequence here has by now; None if it is not here."""
        instance = self._instances.get(instance_id)
        return None if instance is None else instance.engine.num_generated(request_id)

    def die(self) -> None:
        """Lose every process and all of DRAM at once, as a machine does that is switched off."""
        for instance in self._instances.values():
            instance.engine.clear()
        self.is_up = False
        self._memory.clear()
        self._free_slots = [None] * len(self._free_slots)

    def come_back(self) -> None:
        self.is_up = True
        self._boot()

    def _boot(self) -> None:
        self._num_binds: Counter[Digest] = Counter()
        cost, machine = self.machine.cost, self.machine
        self._instances: dict[InstanceId, _Instance] = {}
        self._bound_to: dict[EngineId, _Instance] = {}
        self._cores = SharedCores(machine.slowdown_beside, self._clock, self._schedule)
        self._is_reporting, self._wakes_at = False, float("inf")
        config = CoreConfig(self._devices, machine.num_prewarmed, 1 << 40, cost.max_running, num_cores=1)
        self._core = core = NodeCore(config)
        now = self._clock()
        for action in core.on(ev.Woke(), now):
            if isinstance(action, act.StartEngine):
                core.on(ev.EngineWarm(action.engine_id), now)
        core.bind_pace, core.process_pace = Pace(cost.bind_s), Pace(cost.process_s)

    # ---- what the mind decides ----

    def _on(self, event: ev.NodeEvent) -> None:
        for action in self._core.on(event, self._clock()):
            self._handlers[type(action)](action)
        if not self._is_reporting:
            self._is_reporting = True
            self._schedule(_REPORT_SOON_S, self._report_now, self._core)

    def _later(self, delay_s: Seconds, event: ev.NodeEvent) -> None:
        self._schedule(delay_s, self._if_same, self._core, event)

    def _if_same(self, core: NodeCore, event: ev.NodeEvent) -> None:
        if core is self._core and self.is_up:
            self._on(event)

    def _start(self, action: act.StartEngine) -> None:
        """A process that warms up computes as engines do."""
        warm = ev.EngineWarm(action.engine_id)
        self._cores.compute(self.machine.cost.process_s, self._if_same, self._core, warm)

    def _acquire(self, action: act.AcquireCheckpoint) -> None:
        instance = self._instances[action.instance_id]
        try:
            read = instance.read = self._memory.pin(action.digest, self._clock(), action.may_stream)
        except NearlineError as error:
            self._later(0.0, ev.LeaseRefused(action.instance_id, ErrorInfo.of(error)))
            return
        if self._free_slots:
            self.num_swaps += self._free_slots.pop() not in (None, action.digest)
        self.starts_by_tier[read.tier] = self.starts_by_tier.get(read.tier, 0) + 1
        self._later(0.0, ev.LeaseAcquired(action.instance_id))
        self._schedule(read.seconds, self._filled, instance, read, self._core)

    def _filled(self, instance: _Instance, read: Read, core: NodeCore) -> None:
        if core is not self._core or not self.is_up:
            return
        self._memory.arrived(instance.spec.digest, read.chunks)
        instance.is_filled = True
        self._on(ev.LeaseFilled(instance.spec.instance_id, read.seconds, read.num_bytes, read.tier))
        self._open_if_ready(instance)

    def _bind(self, action: act.BindEngine) -> None:
        model = self._models[action.spec.digest]
        turn = self._num_binds[action.spec.digest]
        self._num_binds[action.spec.digest] += 1
        bind_s = model.binds_s[turn % len(model.binds_s)] if model.binds_s else self.machine.cost.bind_s
        instance = self._bound_to[action.engine_id] = self._instances[action.spec.instance_id]
        self._schedule(bind_s, self._bound, instance, action.engine_id, bind_s, self._core)

    def _bound(self, instance: _Instance, engine_id: EngineId, bind_s: Seconds, core: NodeCore) -> None:
        if core is not self._core or not self.is_up:
            return
        instance.is_bound = True
        self._on(ev.EngineBound(engine_id, instance.spec.instance_id, bind_s, self.machine.cost.kv_tokens))
        self._open_if_ready(instance)

    def _open_if_ready(self, instance: _Instance) -> None:
        if instance.is_filled and instance.is_bound:
            instance.engine.open()
            self._settle_later(instance)

    def _unbind(self, action: act.UnbindEngine) -> None:
        instance = self._bound_to.pop(action.engine_id)
        busy_s = max(0.0, instance.busy_until - self._clock())
        instance.is_settled = True  # or never
        self._later(busy_s + self.machine.cost.stop_s, ev.EngineUnbound(action.engine_id))

    def _compute(
        self, instance_id: InstanceId, seconds: Seconds, done: Callable[..., None], *arguments: object
    ) -> None:
        """Compute a step, after what the engine may be doing of its own."""
        instance = self._instances.get(instance_id)
        busy_s = instance.busy_until - self._clock() if instance is not None else 0.0
        if busy_s > 0.0:
            self._schedule(busy_s, self._cores.compute, seconds, done, *arguments)
        else:
            self._cores.compute(seconds, done, *arguments)

    def _settle_later(self, instance: _Instance) -> None:
        if (
            self._models[instance.spec.digest].settle_s
            and not instance.is_settled
            and not instance.engine.num_sequences
        ):
            self._schedule(_SETTLES_AFTER_S, self._settle, instance, instance.num_submitted)

    def _settle(self, instance: _Instance, num_submitted: int) -> None:
        is_idle = num_submitted == instance.num_submitted and not instance.engine.num_sequences
        if is_idle and not instance.is_settled:
            instance.is_settled = True
            instance.busy_until = self._clock() + self._models[instance.spec.digest].settle_s

    def _release(self, action: act.ReleaseCheckpoint) -> None:
        instance = self._instances[action.instance_id]
        if instance.read is not None:
            self._memory.unpin(instance.spec.digest)
            self._free_slots.append(instance.spec.digest)
            instance.read = None
        if instance.has_ended:
            del self._instances[action.instance_id]

    def _preloaded(self, digest: Digest, read: Read, core: NodeCore) -> None:
        if core is self._core and self.is_up:
            self._memory.arrived(digest, read.chunks)
            self._memory.unpin(digest)
            self._report_now(core)

    def _await_drain(self, action: act.AwaitDrain) -> None:
        self._instances[action.instance_id].is_draining = True
        self._emptied(action.instance_id)

    def _emptied(self, instance_id: InstanceId) -> None:
        instance = self._instances.get(instance_id)
        if instance is not None:
            self._settle_later(instance)
        if instance is not None and instance.is_draining and not instance.engine.num_sequences:
            instance.is_draining = False
            self._later(0.0, ev.Drained(instance_id))

    def _fail_sequences(self, action: act.FailSequences) -> None:
        for sequence in self._instances[action.instance_id].engine.clear():
            ids, num_tokens = (sequence.request_id, sequence.attempt), sequence.num_generated
            self._post(SequenceEnded(*ids, FinishReason.ERROR, num_tokens, action.error))

    def _changed(self, status: InstanceStatus) -> None:
        instance = self._instances.get(status.instance_id)
        if instance is not None and status.state in (InstanceState.STOPPED, InstanceState.FAILED):
            instance.has_ended = True
            if instance.read is None:
                del self._instances[status.instance_id]
        self._post(InstanceChanged(self.node_id, status))

    def _wake_at(self, action: act.WakeAt) -> None:
        self._wakes_at = action.at
        self._schedule(action.at - self._clock(), self._woke, action.at, self._core)

    def _woke(self, at: Seconds, core: NodeCore) -> None:
        if core is self._core and self.is_up and at == self._wakes_at:
            self._on(ev.Woke())

    def _report_now(self, core: NodeCore) -> None:
        self._is_reporting = False
        if core is self._core and self.is_up:
            self._post(NodeReported(self.report()))


def _checkpoint(digest: Digest, num_bytes: int) -> CheckpointInfo:
    return CheckpointInfo(digest, CheckpointKind.MODEL, num_bytes, "", "", "", "", ())

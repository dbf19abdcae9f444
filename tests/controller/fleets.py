"""Literals for fleets, and a world of honest node agents in virtual time that obeys ControllerCore's actions."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.actions import Action
from nearline.controller.config import CoreConfig
from nearline.controller.core import ControllerCore
from nearline.controller.events import Event, RequestInfo
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
    ModelId,
    ModelSpec,
    NodeId,
    NodeReport,
    RequestId,
    Residency,
    Slo,
    StartTimings,
    Tier,
    TierBandwidth,
)
from nearline.protocol.errors import ErrorInfo, InstanceFailed

GB = 10**9
MAX_RUNNING = 4


def checkpoint(digest: str, num_bytes: int = GB, kind: CheckpointKind = CheckpointKind.MODEL) -> CheckpointInfo:
    return CheckpointInfo(Digest(digest), kind, num_bytes, "llama", "LlamaForCausalLM", "x", "bfloat16", ())


def model(name: str, digest: str = "", num_bytes: int = GB, **settings: Any) -> ModelSpec:
    return ModelSpec(ModelId(name), checkpoint(digest or f"digest-of-{name}", num_bytes), 0.0, **settings)


def info(request_id: str, model_id: str = "a", **settings: Any) -> RequestInfo:
    return RequestInfo(RequestId(request_id), ModelId(model_id), 100, **({"max_tokens": 50} | settings))


def resident(digest: str, num_bytes: int = GB, dram_bytes: int = 0) -> Residency:
    return Residency(Digest(digest), num_bytes, ssd_bytes=num_bytes, dram_bytes=dram_bytes)


def report(node_id: str = "n1", num_slots: int = 1, digests: Iterable[str] = (), **settings: Any) -> NodeReport:
    base = NodeReport(
        node_id=NodeId(node_id),
        http_url=f"http://{node_id}",
        devices=(DeviceInfo(0, "cpu", "cpu", 64 * GB, num_slots),),
        dram_pool_bytes=64 * GB,
        dram_free_bytes=32 * GB,
        ssd_budget_bytes=500 * GB,
        ssd_free_bytes=100 * GB,
        bandwidths=(TierBandwidth(Tier.SSD, 2.0 * GB), TierBandwidth(Tier.DRAM, 20.0 * GB)),
        bind_s=0.05,
        process_s=1.0,
        num_prewarmed=2,
        residency=tuple(resident(digest) for digest in digests),
    )
    return replace(base, **settings)


TIMINGS = StartTimings(0.0, 0.05, 0.5, GB, Tier.SSD, True)


@dataclass(eq=False)
class FakeInstance:
    spec: InstanceSpec
    state: InstanceState = InstanceState.PENDING
    sequences: dict[RequestId, int] = field(default_factory=dict)
    yielded: dict[RequestId, None] = field(default_factory=dict)
    error: ErrorInfo | None = None
    is_loaded: bool = False

    def status(self) -> InstanceStatus:
        timings = TIMINGS if self.is_loaded else None
        spec = self.spec
        return InstanceStatus(
            *(spec.instance_id, spec.model_id, spec.digest, self.state, spec.device_index),
            max_running=MAX_RUNNING, timings=timings, error=self.error,
        )  # fmt: skip


@dataclass(eq=False)
class FakeNode:
    report: NodeReport
    is_connected: bool = False
    instances: dict[InstanceId, FakeInstance] = field(default_factory=dict)

    def full_report(self) -> NodeReport:
        return replace(self.report, instances=tuple(i.status() for i in self.instances.values()))


class World:
    """Nodes, engines and callers around one core. Asserts that actions make sense and that a request ends once."""

    def __init__(self, config: CoreConfig | None = None) -> None:
        self.config = config or CoreConfig()
        self.core = ControllerCore(self.config)
        self.now = 0.0
        self.nodes: dict[NodeId, FakeNode] = {}
        self.open: dict[RequestId, int] = {}
        self.ended: dict[RequestId, str] = {}
        self.errors: dict[RequestId, ErrorInfo] = {}
        self.generated: dict[RequestId, int] = {}
        """Tokens that came to a request's caller, over all attempts."""
        self.actions: list[Action] = []
        self.journal: list[tuple[Event, float]] = []
        self.wake_at: float | None = None
        self._events: deque[Event] = deque()
        self._is_busy = False

    # ---- what tests make happen ----

    def post(self, event: Event) -> None:
        self._events.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        while self._events:
            event = self._events.popleft()
            self.journal.append((event, self.now))
            for action in self.core.on(event, self.now):
                self.actions.append(action)
                self._obey(action)
            self.core.check()
        self._is_busy = False
        assert set(self.open) == set(self.core.fleet.requests)

    def add_node(self, node_report: NodeReport) -> FakeNode:
        node = self.nodes[node_report.node_id] = FakeNode(node_report)
        self.connect(node)
        return node

    def connect(self, node: FakeNode) -> None:
        for instance in node.instances.values():
            instance.sequences.clear()
        node.is_connected = True
        self.post(happened.NodeJoined(node.full_report()))

    def disconnect(self, node: FakeNode) -> None:
        node.is_connected = False
        for instance in node.instances.values():
            instance.sequences.clear()
        self.post(happened.NodeLost(node.report.node_id))

    def arrive(self, request_id: str, model_id: str = "a", **settings: Any) -> None:
        request = info(request_id, model_id, **settings)
        self.open[request.request_id] = 0
        self.post(happened.RequestArrived(request))

    def cancel(self, request_id: str) -> None:
        name = RequestId(request_id)
        self._end(name, "cancelled")
        self.post(happened.RequestCancelled(name, self.generated.get(name, 0)))

    def token(self, request_id: str) -> None:
        name = RequestId(request_id)
        self.generate(name, 1)
        self.post(happened.FirstToken(name, self.open[name]))

    def generate(self, request_id: str, num_tokens: int) -> None:
        """Bring tokens to a request's caller, of which the core hears in the end."""
        name = RequestId(request_id)
        self.generated[name] = self.generated.get(name, 0) + num_tokens

    def _brought(self, request_id: RequestId) -> int:
        """Tokens of an answer that its engine ends: three, unless more came."""
        self.generated[request_id] = max(3, self.generated.get(request_id, 0))
        return self.generated[request_id]

    def finish(self, request_id: str, error: ErrorInfo | None = None) -> None:
        """The engine ends a sequence: by itself, or with an error."""
        name = RequestId(request_id)
        _, instance = self.running()[name]
        attempt = instance.sequences.pop(name)
        if error is None:
            self._end(name, "finished")
        reason = FinishReason.STOP if error is None else FinishReason.ERROR
        self.post(happened.SequenceEnded(name, attempt, reason, self._brought(name), error))
        self._stop_if_drained(instance)

    def move(self, instance: FakeInstance, state: InstanceState, error: ErrorInfo | None = None) -> None:
        node = self.node_of(instance)
        instance.state, instance.error = state, error
        if state in (InstanceState.STOPPED, InstanceState.FAILED):
            del node.instances[instance.spec.instance_id]
        if node.is_connected:
            self.post(happened.InstanceChanged(node.report.node_id, instance.status()))

    def crash(self, instance: FakeInstance, text: str = "engine died") -> None:
        self.move(instance, InstanceState.FAILED, ErrorInfo.of(InstanceFailed(text)))

    def start(self, instance: FakeInstance) -> None:
        """Bring a starting instance to READY, then its bytes: as a node agent says it."""
        self.bind(instance)
        self.load(instance)

    def bind(self, instance: FakeInstance) -> None:
        """Let requests come to a starting instance while its bytes do not."""
        if instance.state in (InstanceState.PENDING, InstanceState.LOADING):
            self.move(instance, InstanceState.LOADING)
            self.move(instance, InstanceState.READY)

    def load(self, instance: FakeInstance) -> None:
        """Bring the last bytes of a bound instance."""
        if instance in self.instances() and instance.state is InstanceState.READY and not instance.is_loaded:
            instance.is_loaded = True
            self.move(instance, InstanceState.READY)

    def start_all(self) -> None:
        for instance in self.instances():
            self.start(instance)

    def drain_ends(self, instance: FakeInstance) -> None:
        """The drain time is over: the agent aborts what still runs, then stops the instance."""
        for name, attempt in list(instance.sequences.items()):
            del instance.sequences[name]
            self.post(happened.SequenceEnded(name, attempt, FinishReason.CANCELLED, self._brought(name)))
        self._stop_if_drained(instance)

    def sleep(self, seconds: float) -> None:
        """Let time pass, waking the core whenever it asked to be woken."""
        end = self.now + seconds
        while self.wake_at is not None and self.wake_at <= end:
            self.now, self.wake_at = max(self.now, self.wake_at), None
            self.post(happened.Woke())
        self.now = end

    # ---- what tests look at ----

    def node_of(self, instance: FakeInstance) -> FakeNode:
        return next(n for n in self.nodes.values() if instance.spec.instance_id in n.instances)

    def instances(self, model_id: str | None = None) -> list[FakeInstance]:
        found = [i for node in self.nodes.values() for i in node.instances.values()]
        return [i for i in found if model_id in (None, i.spec.model_id)]

    def running(self) -> dict[RequestId, tuple[FakeNode, FakeInstance]]:
        return {
            name: (node, instance)
            for node in self.nodes.values()
            for instance in node.instances.values()
            for name in instance.sequences
        }

    def take(self, kind: type) -> list[Any]:
        """Remove and return the actions of one kind seen so far."""
        found = [action for action in self.actions if isinstance(action, kind)]
        self.actions = [action for action in self.actions if not isinstance(action, kind)]
        return found

    # ---- how agents obey ----

    def _end(self, request_id: RequestId, how: str) -> None:
        del self.open[request_id]
        assert request_id not in self.ended, f"{request_id} ended twice"
        self.ended[request_id] = how

    def _obey(self, action: Action) -> None:
        assert isinstance(action, do.WakeAt) or action.reason
        match action:
            case do.Reject(request_id, error):
                self._end(request_id, error.code)
                self.errors[request_id] = error
                self._events.append(happened.RequestRejected(request_id, self.generated.get(request_id, 0)))
            case do.Dispatch(request_id, instance_id, node_id, attempt):
                self._submit(self.nodes[node_id], instance_id, request_id, attempt)
            case do.AbortSequence(request_id, instance_id, node_id):
                self._abort(self.nodes[node_id], instance_id, request_id)
            case do.YieldPlace(request_id, instance_id, node_id):
                self._yield(self.nodes[node_id], instance_id, request_id)
            case do.EnsureInstance(spec, node_id):
                self._ensure(self.nodes[node_id], spec)
            case do.StopInstance(instance_id, node_id):
                self._stop(self.nodes[node_id], instance_id)
            case do.PrepareAdapter(instance_id, node_id):
                node = self.nodes[node_id]
                assert not node.is_connected or instance_id in node.instances, "nobody is there to prepare"
            case do.WakeAt(at):
                self.wake_at = at
            case _:
                pass

    def _submit(self, node: FakeNode, instance_id: InstanceId, request_id: RequestId, attempt: int) -> None:
        assert attempt > self.open[request_id], "attempts only grow"
        self.open[request_id] = attempt
        if not node.is_connected:
            return
        instance = node.instances[instance_id]
        assert instance.state is InstanceState.READY
        assert request_id not in self.running()
        instance.sequences[request_id] = attempt
        num_yielded = len([name for name in instance.yielded if name in instance.sequences])
        assert len(instance.sequences) - num_yielded <= MAX_RUNNING + self.config.dispatch_headroom

    def _yield(self, node: FakeNode, instance_id: InstanceId, request_id: RequestId) -> None:
        if node.is_connected:
            assert request_id in node.instances[instance_id].sequences, "only what runs gives way"
            node.instances[instance_id].yielded[request_id] = None

    def _abort(self, node: FakeNode, instance_id: InstanceId, request_id: RequestId) -> None:
        instance = node.instances.get(instance_id)
        if node.is_connected and instance is not None:
            instance.sequences.pop(request_id, None)
            self._stop_if_drained(instance)

    def _ensure(self, node: FakeNode, spec: InstanceSpec) -> None:
        if not node.is_connected or spec.instance_id in node.instances:
            return
        taken = [i for i in node.instances.values() if i.spec.device_index == spec.device_index]
        assert len(taken) < node.report.devices[spec.device_index].num_slots, "no free slot"
        instance = node.instances[spec.instance_id] = FakeInstance(spec)
        self._events.append(happened.InstanceChanged(node.report.node_id, instance.status()))

    def _stop(self, node: FakeNode, instance_id: InstanceId) -> None:
        instance = node.instances.get(instance_id)
        if node.is_connected and instance is not None:
            instance.state = InstanceState.DRAINING
            self._events.append(happened.InstanceChanged(node.report.node_id, instance.status()))
            self._stop_if_drained(instance)

    def _stop_if_drained(self, instance: FakeInstance) -> None:
        if instance not in self.instances() or instance.state is not InstanceState.DRAINING or instance.sequences:
            return
        node = self.node_of(instance)
        if node.is_connected:
            del node.instances[instance.spec.instance_id]
            stopped = replace(instance.status(), state=InstanceState.STOPPED)
            self.post(happened.InstanceChanged(node.report.node_id, stopped))


def world(*names: str, num_slots: int = 1, config: CoreConfig | None = None, **settings: Any) -> World:
    """One node with `num_slots` slots that holds a model of each name."""
    made = World(config)
    for name in names:
        made.post(happened.ModelAdded(model(name, **settings)))
    made.add_node(report(num_slots=num_slots, digests=[f"digest-of-{name}" for name in names]))
    return made


def slo(deadline_s: float | None = None, **settings: Any) -> Slo:
    return Slo(deadline_s=deadline_s, **settings)

"""The fleet as the controller believes it to be: nodes, instances, models, requests. Only the core changes it. Pure.

The picture is advisory: an instance's state belongs to its node agent, which decides again whatever is gated on it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from nearline.controller.estimate import ResumeCost
from nearline.controller.policy.adapters import AdapterTraffic
from nearline.controller.policy.demand import Demand, Sharing
from nearline.controller.policy.keep_alive import GapHistogram
from nearline.controller.policy.prediction import PRIOR_TOKENS, LengthPredictor, bucket_of
from nearline.controller.policy.waiting import WaitEstimator
from nearline.controller.promises import Promises
from nearline.controller.queues import RequestRecord, VirtualQueue
from nearline.controller.references import References
from nearline.protocol import (
    AdapterSpec,
    Bytes,
    CheckpointInfo,
    DeviceInfo,
    Digest,
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
    Seconds,
    StepProfile,
    TaskId,
    Tier,
)

ENDED = (InstanceState.STOPPED, InstanceState.FAILED)
_NUM_PREFIXES = 256
ModelKey = tuple[ModelId, Digest]


@dataclass(slots=True, eq=False)
class InstanceRecord:
    """One instance and what the controller has sent to it. `in_flight` counts against its places until the end, but
    for the `num_preempted` of them that gave way to others.

    `ready_at` is when requests could come, `loaded_at` when all its bytes were there: its start is over then.
    `is_doubtful`: it just failed a sequence by its own fault; its node has not said yet whether it still lives.
    """

    spec: InstanceSpec
    node: "NodeRecord"
    model: "ModelRecord"
    created_at: Seconds
    estimate_s: Seconds = 0.0
    state: InstanceState = InstanceState.PENDING
    is_acknowledged: bool = False
    is_stopping: bool = False
    stop_by: Seconds = 0.0
    ready_at: Seconds | None = None
    loaded_at: Seconds | None = None
    idle_since: Seconds | None = None
    has_worked: bool = False
    is_doubtful: bool = False
    max_running: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    num_preempted: int = 0
    in_flight: dict[RequestId, RequestRecord] = field(default_factory=dict)
    adapters: OrderedDict[Digest, None] = field(default_factory=OrderedDict)
    """Those on its device, or awaited there by requests in flight."""
    reported_adapters: tuple[Digest, ...] = ()
    homes: dict[Digest, None] = field(default_factory=dict)
    """Adapters whose requests should come here first."""
    prepared: dict[Digest, None] = field(default_factory=dict)
    """Adapters it was asked to read ahead, whether or not it did, while they are called and not given up there."""
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def instance_id(self) -> InstanceId:
        return self.spec.instance_id

    @property
    def is_usable(self) -> bool:
        """New requests may be dispatched to it."""
        if self.state is not InstanceState.READY or self.is_stopping or self.is_doubtful:
            return False
        return self.node.is_connected

    @property
    def is_live(self) -> bool:
        """It serves, or will."""
        return not self.is_stopping

    def apply(self, status: InstanceStatus) -> None:
        """Take over what its node says."""
        self.state = status.state
        self.is_acknowledged = True
        self.is_doubtful = False
        self.max_running = max(1, status.max_running)
        self.kv_tokens_used, self.kv_tokens_total = status.kv_tokens_used, status.kv_tokens_total
        reported = dict.fromkeys(status.adapter_digests)
        for digest in self.reported_adapters:
            if digest not in reported:
                self.prepared.pop(digest, None)
        self.reported_adapters = status.adapter_digests
        # What is not there may still be read for a request that waits for it; with none it has failed or has left.
        awaited = {request.info.adapter_digest for request in self.in_flight.values()}
        for digest in [one for one in self.adapters if one not in reported and one not in awaited]:
            del self.adapters[digest]
        self.adapters.update(reported)

    def remember(self, request: RequestRecord) -> None:
        """Note what a dispatched request leaves in the instance: its adapter and its prompt's prefix."""
        if request.info.adapter_digest is not None:
            self.adapters[request.info.adapter_digest] = None
        if request.info.prefix_hash:
            self.prefixes[request.info.prefix_hash] = None
            self.prefixes.move_to_end(request.info.prefix_hash)
            if len(self.prefixes) > _NUM_PREFIXES:
                self.prefixes.popitem(last=False)

    def forget_adapter(self, digest: Digest) -> None:
        """An adapter is gone: its node lets go of it. Registered again, it is a new one."""
        for known in (self.adapters, self.homes, self.prepared):
            known.pop(digest, None)


@dataclass(slots=True, eq=False)
class NodeRecord:
    """One machine: its last report, whether its link stands, and when its storage link will be free."""

    report: NodeReport
    is_connected: bool = True
    storage_free_at: Seconds = 0.0
    instances: dict[InstanceId, InstanceRecord] = field(default_factory=dict)
    residency: dict[Digest, Residency] = field(default_factory=dict)
    profiles: dict[Digest, StepProfile] = field(default_factory=dict)

    @property
    def node_id(self) -> NodeId:
        return self.report.node_id

    def apply(self, report: NodeReport) -> None:
        if report.residency is not self.report.residency or len(self.residency) != len(report.residency):
            self.residency = {row.digest: row for row in report.residency}
        self.report = report
        self.profiles = {profile.digest: profile for profile in report.profiles}

    def imported(self, checkpoint: CheckpointInfo) -> None:
        """Count a checkpoint whose import just ended as being on this node's disk."""
        row = Residency(checkpoint.digest, checkpoint.num_bytes, ssd_bytes=checkpoint.num_bytes, dram_bytes=0)
        self.residency.setdefault(checkpoint.digest, row)

    def holds(self, digest: Digest | None) -> bool:
        """Whether all bytes are here (they fetch from each other only when told to). None is held by everyone."""
        if digest is None:
            return True
        row = self.residency.get(digest)
        return row is not None and (row.is_fetchable or max(row.ssd_bytes, row.dram_bytes) >= row.num_bytes)

    def bandwidth(self, tier: Tier) -> float:
        """Bytes per second out of a tier; 0 if this node does not have the tier."""
        for row in self.report.bandwidths:
            if row.tier is tier:
                return row.bytes_per_s
        return 0.0

    def on_device(self, device: DeviceInfo) -> list[InstanceRecord]:
        """Instances that occupy a slot of the device, draining ones too."""
        return [i for i in self.instances.values() if i.spec.device_index == device.index]


@dataclass(slots=True, eq=False)
class ModelRecord:
    """One version of a model: who waits for it, what serves it, and how its starts have gone.

    `starved_since` is set exactly while requests wait and nothing serves or starts, `quiet_since` while it has no
    request at all (and had one), `spare_since` while one replica fewer would do. A retired version accepts no
    new requests; it lives until its last request has ended and its last instance has stopped.
    """

    spec: ModelSpec
    queue: VirtualQueue = field(default_factory=VirtualQueue)
    instances: dict[InstanceId, InstanceRecord] = field(default_factory=dict)
    num_running: int = 0
    is_retired: bool = False
    starved_since: Seconds | None = None
    unplaceable_since: Seconds | None = None
    num_start_failures: int = 0
    retry_at: Seconds = 0.0
    failed_nodes: dict[NodeId, None] = field(default_factory=dict)
    preloading_on: NodeId | None = None
    wait_reason: str = ""
    service_s: Seconds = 1.0
    last_places: int = 0
    lengths: LengthPredictor = field(default_factory=LengthPredictor)
    traffic: AdapterTraffic = field(default_factory=AdapterTraffic)
    homes_for: tuple[tuple[InstanceId, ...], int] = ((), 0)
    homes_due: Seconds = 0.0
    memory_due: Seconds = 0.0
    prepared_for: tuple[InstanceId, ...] = ()
    prepare_due: Seconds = 0.0
    waits: WaitEstimator = field(default_factory=WaitEstimator)
    resume: ResumeCost = field(default_factory=ResumeCost)
    gaps: GapHistogram = field(default_factory=GapHistogram)
    quiet_since: Seconds | None = None
    demand: Demand = field(default_factory=Demand)
    sharing: Sharing = field(default_factory=Sharing)
    spare_since: Seconds | None = None
    last_start_s: Seconds = 0.0
    measurements: dict[TaskId, None] = field(default_factory=dict)
    digest: Digest = field(init=False)
    key: ModelKey = field(init=False)

    def __post_init__(self) -> None:
        self.digest = self.spec.checkpoint.digest
        self.key = (self.spec.model_id, self.digest)

    @property
    def name(self) -> str:
        """The version as the name of a timer."""
        return f"{self.digest} {self.spec.model_id}"

    @property
    def num_bytes(self) -> Bytes:
        return self.spec.checkpoint.num_bytes

    @property
    def num_live(self) -> int:
        count = 0
        for instance in self.instances.values():
            count += not instance.is_stopping
        return count

    @property
    def num_places(self) -> int:
        """Sequences that its usable instances run at once."""
        count = 0
        for instance in self.instances.values():
            if instance.is_usable:
                count += instance.max_running
        return count

    def refresh(self, now: Seconds) -> None:
        """Note when the model begins or ceases to be starved."""
        if not self.queue.num_waiting or self.num_live:
            self.starved_since = None
        elif self.starved_since is None:
            self.starved_since = now

    def expect(self, profile: StepProfile, num_running: int) -> None:
        """Until answers tell, believe what steps were measured to take on a node that serves it."""
        if self.waits.num_answers == 0:
            self.waits.expect(profile.model, num_running)
            self.service_s = self.waits.service(bucket_of(PRIOR_TOKENS)).mean_s

    def retire(self) -> None:
        """Take the name away from this version; it serves on only for those who hold it."""
        self.is_retired = True
        self.spec = replace(self.spec, min_replicas=0)


@dataclass(slots=True)
class Fleet:
    """Everything the controller knows. `current` maps a name to the version new requests go to; `doomed` lists
    digests whose bytes go as soon as nothing refers to them: no registered name, no version still draining, no request
    under way."""

    nodes: dict[NodeId, NodeRecord] = field(default_factory=dict)
    instances: dict[InstanceId, InstanceRecord] = field(default_factory=dict)
    models: dict[ModelKey, ModelRecord] = field(default_factory=dict)
    current: dict[ModelId, Digest] = field(default_factory=dict)
    adapters: dict[ModelId, AdapterSpec] = field(default_factory=dict)
    requests: dict[RequestId, RequestRecord] = field(default_factory=dict)
    doomed: dict[Digest, None] = field(default_factory=dict)
    references: References = field(default_factory=References)
    num_waiting: int = 0
    promises: Promises = field(default_factory=Promises)

    def current_model(self, model_id: ModelId) -> ModelRecord | None:
        """The version that new requests for this name go to."""
        digest = self.current.get(model_id)
        return None if digest is None else self.models[model_id, digest]

    def model_of(self, request: RequestRecord) -> ModelRecord:
        return self.models[request.info.model_id, request.digest]

    def add_model(self, model: ModelRecord) -> None:
        """Enter a version that is not known."""
        self.models[model.key] = model
        self.references.add(model.digest)

    def drop_model(self, model: ModelRecord) -> None:
        del self.models[model.key]
        self.references.drop(model.digest)

    def put_adapter(self, spec: AdapterSpec) -> AdapterSpec | None:
        """Register an adapter; give what its name meant before."""
        old = self.drop_adapter(spec.adapter_id)
        self.adapters[spec.adapter_id] = spec
        self.references.add(spec.checkpoint.digest)
        return old

    def drop_adapter(self, adapter_id: ModelId) -> AdapterSpec | None:
        old = self.adapters.pop(adapter_id, None)
        if old is not None:
            self.references.drop(old.checkpoint.digest)
        return old

    def add_request(self, request: RequestRecord) -> None:
        self.requests[request.info.request_id] = request
        self.references.add(request.info.adapter_digest)

    def drop_request(self, request: RequestRecord) -> None:
        del self.requests[request.info.request_id]
        self.references.drop(request.info.adapter_digest)

    def add_instance(self, instance: InstanceRecord) -> None:
        self.instances[instance.instance_id] = instance
        instance.node.instances[instance.instance_id] = instance
        instance.model.instances[instance.instance_id] = instance

    def drop_instance(self, instance: InstanceRecord) -> None:
        del self.instances[instance.instance_id]
        del instance.node.instances[instance.instance_id]
        del instance.model.instances[instance.instance_id]

    def check(self) -> None:
        """Assert what must hold after every event. Raises AssertionError with the first problem."""
        for problem in self._problems():
            raise AssertionError(problem)

    def _problems(self) -> Iterator[str]:
        waiting = [r for model in self.models.values() for r in model.queue.requests()]
        running = [r for instance in self.instances.values() for r in instance.in_flight.values()]
        if self.num_waiting != len(waiting):
            yield f"{self.num_waiting} requests counted as waiting, {len(waiting)} wait"
        if sorted(r.order for r in waiting + running) != sorted(r.order for r in self.requests.values()):
            yield "a request waits or runs twice, or nowhere"
        needed = [model.digest for model in self.models.values()]
        needed += [adapter.checkpoint.digest for adapter in self.adapters.values()]
        needed += [r.info.adapter_digest for r in self.requests.values() if r.info.adapter_digest is not None]
        if self.references.counts != Counter(needed):
            yield "it is miscounted what needs a checkpoint"
        for request in self.requests.values():
            yield from self._request_problems(request)
            if request.preempted_at is not None and request.instance_id is None:
                yield f"{request.info.request_id} is preempted from nowhere"
        for node in self.nodes.values():
            for device in node.report.devices:
                if node.is_connected and len(node.on_device(device)) > device.num_slots:
                    yield f"{node.node_id} device {device.index} runs more than its {device.num_slots} slots"
        for model in self.models.values():
            yield from self._model_problems(model)

    def _request_problems(self, request: RequestRecord) -> Iterator[str]:
        request_id, model = request.info.request_id, self.models.get((request.info.model_id, request.digest))
        if model is None:
            yield f"{request_id} needs a model version that was forgotten"
        elif request.instance_id is not None:
            instance = self.instances.get(request.instance_id)
            if instance is None or request_id not in instance.in_flight:
                yield f"{request_id} is said to run on {request.instance_id}, which does not know it"
            elif instance.model is not model:
                yield f"{request_id} runs on an instance of another model version"

    def _model_problems(self, model: ModelRecord) -> Iterator[str]:
        key, queue = model.key, model.queue
        if model.num_running != sum(len(i.in_flight) for i in model.instances.values()):
            yield f"{key} miscounts its running requests"
        if queue.num_waiting != len(queue.requests()):
            yield f"{key} miscounts its waiting requests"
        if (model.starved_since is not None) != (queue.num_waiting > 0 and model.num_live == 0):
            yield f"{key} is wrong about being starved"
        if model.is_retired == (self.current.get(model.spec.model_id) == model.digest):
            yield f"{key} is both current and retired, or neither"
        for instance in model.instances.values():
            if instance.num_preempted != sum(r.preempted_at is not None for r in instance.in_flight.values()):
                yield f"{instance.instance_id} miscounts its preempted requests"
            if (instance.idle_since is not None) and instance.in_flight:
                yield f"{instance.instance_id} is idle and busy at once"
        for group in queue.groups.values():
            orders = [request.order for request in group.waiting.values()]
            if orders != sorted(orders):
                yield f"a group of {key} is not first in, first out"
            if orders != sorted(request.order for line in group.lines.values() for request in line.values()):
                yield f"a group of {key} and its tenants' lines disagree"
            if bool(orders) != (group.key in queue.busy_groups):
                yield f"a group of {key} is unreachable"

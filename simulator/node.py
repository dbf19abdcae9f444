"""A simulated machine: slots, DRAM with least-recently-used residency, one storage link, engines that batch.

It obeys like a node agent and answers after what the cost model says. It decides nothing but what to evict from DRAM.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from nearline.controller.events import Event, FirstToken, InstanceChanged, NodeReported, SequenceEnded
from nearline.protocol import (
    Bytes,
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
    Residency,
    Seconds,
    StartTimings,
    Tier,
    TierBandwidth,
)
from nearline.simulator.cost_model import CostModel

Schedule = Callable[[Seconds, Callable[[], None]], None]
Post = Callable[[Event], None]


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    request_id: RequestId
    attempt: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_generated: int = 0


@dataclass(slots=True, eq=False)
class SimulatedInstance:
    spec: InstanceSpec
    state: InstanceState = InstanceState.LOADING
    timings: StartTimings | None = None
    is_loaded: bool = False
    running: dict[RequestId, SimulatedSequence] = field(default_factory=dict)
    waiting: OrderedDict[RequestId, SimulatedSequence] = field(default_factory=OrderedDict)


class SimulatedNode:
    """Calls `post` with events, and `schedule(delay, function)` for what happens later.

    Like an agent it says READY once requests may come; they run when the bytes are there.
    """

    def __init__(
        self, node_id: NodeId, num_slots: int, dram_bytes: Bytes, sizes: dict[Digest, Bytes], cost: CostModel
    ) -> None:
        self.node_id = node_id
        self.cost = cost
        self.num_slots = num_slots
        self.dram_bytes = dram_bytes
        self.instances: dict[InstanceId, SimulatedInstance] = {}
        self.starts_by_tier: dict[Tier, int] = {}
        self.num_swaps = 0
        self.is_up = True
        self._sizes = sizes
        self._on_disk = {digest: Residency(digest, size, size, 0) for digest, size in sizes.items()}
        self._dram: OrderedDict[Digest, Bytes] = OrderedDict()
        self._storage_free_at = 0.0
        self._free_slots: list[Digest | None] = [None] * num_slots

    def connect(self, schedule: Schedule, post: Post) -> None:
        self._schedule, self._post = schedule, post

    def report(self) -> NodeReport:
        """What the node says of itself now."""
        cost = self.cost
        pinned = {instance.spec.digest: None for instance in self.instances.values()}
        rows = dict(self._on_disk)
        for digest, dram_bytes in self._dram.items():
            size = self._sizes[digest]
            rows[digest] = Residency(digest, size, size, dram_bytes, digest in pinned)
        return NodeReport(
            node_id=self.node_id,
            http_url="",
            devices=(DeviceInfo(0, "simulated", "simulated", self.dram_bytes, self.num_slots),),
            dram_pool_bytes=self.dram_bytes,
            dram_free_bytes=self.dram_bytes - sum(self._dram.values()),
            ssd_budget_bytes=sum(self._sizes.values()),
            ssd_free_bytes=0,
            bandwidths=(TierBandwidth(Tier.SSD, cost.ssd_bytes_per_s), TierBandwidth(Tier.DRAM, cost.dram_bytes_per_s)),
            bind_s=cost.bind_s,
            process_s=cost.process_s,
            num_prewarmed=self.num_slots,
            residency=tuple(rows.values()),
            instances=tuple(self._status(instance) for instance in self.instances.values()),
        )

    def ensure(self, spec: InstanceSpec, now: Seconds) -> None:
        """Start an instance: wait for the storage link, read what DRAM lacks, bind."""
        if not self.is_up:
            return
        instance = self.instances[spec.instance_id] = SimulatedInstance(spec)
        if len(self._free_slots) > 0:
            self.num_swaps += self._free_slots.pop() not in (None, spec.digest)
        read_s, tier, num_bytes = self._read(spec.digest, now)
        self.starts_by_tier[tier] = self.starts_by_tier.get(tier, 0) + 1
        instance.timings = StartTimings(0.0, self.cost.bind_s, read_s, num_bytes, tier, is_prewarmed=True)
        self._changed(instance)
        self._schedule(self.cost.bind_s, lambda: self._ready(instance))
        self._schedule(read_s + self.cost.bind_s, lambda: self._loaded(instance))

    def preload(self, digest: Digest, now: Seconds) -> None:
        if not self.is_up:
            return
        read_s, _, _ = self._read(digest, now)
        self._schedule(read_s, self._report)

    def submit(self, instance_id: InstanceId, sequence: SimulatedSequence) -> None:
        """Run a sequence now if there is a place, else when one comes free."""
        instance = self.instances.get(instance_id)
        if instance is None:
            return  # lost with the node, which the controller has been told
        if instance.is_loaded and len(instance.running) < self.cost.max_running:
            self._run(instance, sequence)
        else:
            instance.waiting[sequence.request_id] = sequence

    def abort(self, instance_id: InstanceId, request_id: RequestId) -> None:
        instance = self.instances.get(instance_id)
        if instance is not None:
            instance.waiting.pop(request_id, None)
            if instance.running.pop(request_id, None) is not None:
                self._place_freed(instance)

    def die(self) -> None:
        """Lose every instance and all of DRAM at once, as a machine does that is switched off."""
        for instance in self.instances.values():
            instance.state = InstanceState.FAILED
            instance.running.clear()
            instance.waiting.clear()
        self.is_up = False
        self.instances.clear()
        self._dram.clear()
        self._storage_free_at = 0.0
        self._free_slots = [None] * self.num_slots

    def stop(self, instance_id: InstanceId, drain_s: Seconds) -> None:
        """Drain, then stop; what still runs at the end of the drain is cancelled."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.state is InstanceState.DRAINING:
            return
        instance.state = InstanceState.DRAINING
        self._changed(instance)
        self._schedule(drain_s, lambda: self._drain_ended(instance))
        self._stop_if_drained(instance)

    def _read(self, digest: Digest, now: Seconds) -> tuple[Seconds, Tier, Bytes]:
        size = self._sizes[digest]
        in_dram = self._dram.get(digest, 0)
        if in_dram == size:
            self._dram.move_to_end(digest)
            return self.cost.read_s(0, size), Tier.DRAM, 0
        self._make_room(size - in_dram)
        self._dram[digest] = size
        self._storage_free_at = max(now, self._storage_free_at) + self.cost.read_s(size - in_dram, 0)
        return self._storage_free_at - now, Tier.SSD, size - in_dram

    def _make_room(self, num_bytes: Bytes) -> None:
        for digest in list(self._dram):
            if self.dram_bytes - sum(self._dram.values()) >= num_bytes:
                return
            if not self._is_pinned(digest):
                del self._dram[digest]

    def _is_pinned(self, digest: Digest) -> bool:
        return any(instance.spec.digest == digest for instance in self.instances.values())

    def _report(self) -> None:
        if self.is_up:
            self._post(NodeReported(self.report()))

    def _ready(self, instance: SimulatedInstance) -> None:
        if instance.state is InstanceState.LOADING:
            instance.state = InstanceState.READY
            self._changed(instance)

    def _loaded(self, instance: SimulatedInstance) -> None:
        if instance.state in (InstanceState.READY, InstanceState.DRAINING):
            instance.is_loaded = True
            self._changed(instance)
            self._report()
            self._place_freed(instance)

    def _run(self, instance: SimulatedInstance, sequence: SimulatedSequence) -> None:
        instance.running[sequence.request_id] = sequence
        prefill_s = self.cost.first_token_s(sequence.num_prompt_tokens + sequence.num_generated)
        rest = sequence.num_output_tokens - sequence.num_generated - 1
        decode_s = self.cost.decode_s(max(0, rest), len(instance.running))
        self._schedule(prefill_s, lambda: self._first_token(instance, sequence))
        self._schedule(prefill_s + decode_s, lambda: self._finished(instance, sequence))

    def _first_token(self, instance: SimulatedInstance, sequence: SimulatedSequence) -> None:
        if instance.running.get(sequence.request_id) is sequence:
            self._post(FirstToken(sequence.request_id, sequence.attempt))

    def _finished(self, instance: SimulatedInstance, sequence: SimulatedSequence) -> None:
        if instance.running.get(sequence.request_id) is not sequence:
            return
        del instance.running[sequence.request_id]
        ended = (sequence.request_id, sequence.attempt, FinishReason.STOP, sequence.num_output_tokens)
        self._post(SequenceEnded(*ended))
        self._place_freed(instance)

    def _place_freed(self, instance: SimulatedInstance) -> None:
        while instance.waiting and len(instance.running) < self.cost.max_running:
            self._run(instance, instance.waiting.popitem(last=False)[1])
        self._stop_if_drained(instance)

    def _drain_ended(self, instance: SimulatedInstance) -> None:
        for sequence in [*instance.running.values(), *instance.waiting.values()]:
            self._post(SequenceEnded(sequence.request_id, sequence.attempt, FinishReason.CANCELLED))
        instance.running.clear()
        instance.waiting.clear()
        self._stop_if_drained(instance)

    def _stop_if_drained(self, instance: SimulatedInstance) -> None:
        is_there = self.instances.get(instance.spec.instance_id) is instance
        if is_there and instance.state is InstanceState.DRAINING and not instance.running and not instance.waiting:
            instance.state = InstanceState.STOPPED
            self._schedule(self.cost.stop_s, lambda: self._stopped(instance))

    def _stopped(self, instance: SimulatedInstance) -> None:
        if self.instances.get(instance.spec.instance_id) is not instance:
            return
        del self.instances[instance.spec.instance_id]
        self._free_slots.append(instance.spec.digest)
        self._changed(instance)

    def _changed(self, instance: SimulatedInstance) -> None:
        self._post(InstanceChanged(self.node_id, self._status(instance)))

    def _status(self, instance: SimulatedInstance) -> InstanceStatus:
        spec, state = instance.spec, instance.state
        if state is InstanceState.STOPPED and spec.instance_id in self.instances:
            state = InstanceState.DRAINING  # its process is still going down
        timings = instance.timings if instance.is_loaded else None
        ids = (spec.instance_id, spec.model_id, spec.digest, state, spec.device_index)
        return InstanceStatus(*ids, max_running=self.cost.max_running, timings=timings)

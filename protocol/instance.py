"""What runs on a machine and what the machine says about itself."""

from dataclasses import dataclass
from enum import StrEnum

from nearline.protocol.errors import ErrorInfo
from nearline.protocol.ids import Bytes, BytesPerSecond, Digest, InstanceId, ModelId, NodeId, Seconds
from nearline.protocol.step_time import StepProfile


class InstanceState(StrEnum):
    """Life of an instance; the table of legal moves is node_agent/lifecycle.py, its only writer the node agent."""

    PENDING = "pending"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class Tier(StrEnum):
    """Where bytes are, nearest to the device last."""

    REMOTE = "remote"
    SSD = "ssd"
    DRAM = "dram"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What the controller wishes to run: one model on one device slot."""

    instance_id: InstanceId
    model_id: ModelId
    digest: Digest
    device_index: int = 0


@dataclass(frozen=True, slots=True)
class StartTimings:
    """Waterfall of one start. `read_*` cover bytes that had to come from `tier`; zero when all were in DRAM.

    Reading overlaps binding and the first prefill, so the parts may add up to more than the whole.
    """

    process_s: Seconds
    bind_s: Seconds
    read_s: Seconds
    read_bytes: Bytes
    tier: Tier
    is_prewarmed: bool


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """One instance as its node sees it. `max_running` is how many sequences it decodes at once.

    READY comes as soon as requests may; `timings` only when all bytes are there, and then they are final.
    """

    instance_id: InstanceId
    model_id: ModelId
    digest: Digest
    state: InstanceState
    device_index: int = 0
    num_running: int = 0
    num_waiting: int = 0
    max_running: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    adapter_digests: tuple[Digest, ...] = ()
    timings: StartTimings | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One accelerator, or the CPU stand-in. `num_slots` instances may live on it at once.

    `weight_bytes` is what is left for weights beside KV caches and contexts; 0: the device has no memory of its own,
    its instances run from the node's DRAM pool.
    """

    index: int
    kind: str
    name: str
    memory_bytes: Bytes
    num_slots: int
    weight_bytes: Bytes = 0


@dataclass(frozen=True, slots=True)
class Residency:
    """How much of a checkpoint is where on this node. `is_fetchable`: what is missing comes from its source when an
    instance needs it."""

    digest: Digest
    num_bytes: Bytes
    ssd_bytes: Bytes
    dram_bytes: Bytes
    is_pinned: bool = False
    is_fetchable: bool = False


@dataclass(frozen=True, slots=True)
class TierBandwidth:
    """Measured rate at which bytes leave a tier towards the device (EWMA, seeded by a start-up probe)."""

    tier: Tier
    bytes_per_s: BytesPerSecond


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The node's whole truth at one moment. Reports replace each other; nothing is merged.

    A checkpoint takes whole frames of `dram_frame_bytes` in the DRAM pool. `profiles` are of checkpoints whose steps
    were measured here.
    """

    node_id: NodeId
    http_url: str
    devices: tuple[DeviceInfo, ...]
    dram_pool_bytes: Bytes
    dram_free_bytes: Bytes
    ssd_budget_bytes: Bytes
    ssd_free_bytes: Bytes
    bandwidths: tuple[TierBandwidth, ...]
    bind_s: Seconds
    process_s: Seconds
    num_prewarmed: int
    residency: tuple[Residency, ...] = ()
    instances: tuple[InstanceStatus, ...] = ()
    dram_frame_bytes: Bytes = 1
    profiles: tuple[StepProfile, ...] = ()

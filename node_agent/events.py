"""What can happen to a node, as NodeCore hears it. Instants are the caller's `now`; nothing here has a clock."""

from dataclasses import dataclass

from nearline.node_agent.types import EngineId
from nearline.protocol import Bytes, CheckpointInfo, Digest, InstanceId, InstanceSpec, Seconds, Tier
from nearline.protocol.errors import ErrorInfo

# ---- wishes of the controller ----


@dataclass(frozen=True, slots=True)
class EnsureWished:
    """Run this instance. `checkpoint` is None when the store lacks it."""

    spec: InstanceSpec
    checkpoint: CheckpointInfo | None


@dataclass(frozen=True, slots=True)
class StopWished:
    """Let running sequences end for at most `drain_s`, then stop."""

    instance_id: InstanceId
    drain_s: Seconds


@dataclass(frozen=True, slots=True)
class DeleteWished:
    """Delete a checkpoint once no instance uses it. A later EnsureWished for it takes the wish back."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class DeleteUnwished:
    """An import has just found or made this checkpoint: an older wish to delete it no longer stands."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The controller is gone: what it dispatched is void, what it wished to run stays."""


# ---- outcomes of actions ----


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """An evicted checkpoint, which an instance waits for, has come further on its way back."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class LeaseAcquired:
    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    instance_id: InstanceId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class LeaseFilled:
    """Every byte of the lease is in DRAM. `read_*` cover those that had to come from `tier`."""

    instance_id: InstanceId
    read_s: Seconds
    read_bytes: Bytes
    tier: Tier


@dataclass(frozen=True, slots=True)
class LeaseBroken:
    """Bytes of the lease cannot be read, or are not what was imported."""

    instance_id: InstanceId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class Drained:
    """No sequence of a draining instance is left."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class Woke:
    """An instant asked for by WakeAt is here."""


@dataclass(frozen=True, slots=True)
class ActionFailed:
    """What the agent tried to do for an instance broke: the instance fails, the agent goes on."""

    instance_id: InstanceId
    error: ErrorInfo


# ---- engine processes ----


@dataclass(frozen=True, slots=True)
class EngineWarm:
    """The process is pre-warmed."""

    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class EngineBound:
    engine_id: EngineId
    instance_id: InstanceId
    bind_s: Seconds
    kv_tokens_total: int


@dataclass(frozen=True, slots=True)
class EngineBindFailed:
    engine_id: EngineId
    instance_id: InstanceId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class EngineUnbound:
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class EngineExited:
    """The process is gone and reaped. `how` says it for people: "signal 9", "exit code 1; see …"."""

    engine_id: EngineId
    how: str


@dataclass(frozen=True, slots=True)
class AdapterChanged:
    """An adapter became usable in an instance, or ceased to be."""

    instance_id: InstanceId
    digest: Digest
    is_loaded: bool


NodeEvent = (
    EnsureWished | StopWished | DeleteWished | DeleteUnwished | LinkLost | BytesMoved | LeaseAcquired | LeaseRefused
    | LeaseFilled | LeaseBroken | Drained | Woke | ActionFailed | EngineWarm | EngineBound | EngineBindFailed
    | EngineUnbound | EngineExited | AdapterChanged
)  # fmt: skip

"""What NodeCore decides. The runtime carries these out and posts outcomes back as events."""

from dataclasses import dataclass

from nearline.node_agent.types import EngineId
from nearline.protocol import Bytes, Digest, InstanceId, InstanceSpec, InstanceStatus, Seconds
from nearline.protocol.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start a process for a device; `reason` is for the log."""

    engine_id: EngineId
    device_index: int
    reason: str


@dataclass(frozen=True, slots=True)
class BindEngine:
    """Make a pre-warmed process an instance, over the frames of the instance's lease."""

    engine_id: EngineId
    spec: InstanceSpec
    kv_bytes: Bytes
    max_running: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class UnbindEngine:
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class KillEngine:
    """End a process, by SIGKILL if it does not listen; EngineExited follows in any case."""

    engine_id: EngineId
    reason: str


@dataclass(frozen=True, slots=True)
class AcquireCheckpoint:
    """Pin the checkpoint's frames and start reading; LeaseAcquired or LeaseRefused follows at once.

    `may_stream`: the device has memory of its own, so a checkpoint larger than the pool may pass it by.
    """

    instance_id: InstanceId
    digest: Digest
    may_stream: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseCheckpoint:
    """Unpin: no process maps the frames for this instance any more."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class DeleteCheckpoint:
    digest: Digest


@dataclass(frozen=True, slots=True)
class SendStatus:
    status: InstanceStatus


@dataclass(frozen=True, slots=True)
class AwaitDrain:
    """Post Drained as soon as the instance has no sequence left (at once if it has none)."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class FailSequences:
    """End every sequence of the instance with this error towards the controller."""

    instance_id: InstanceId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class AbortSequences:
    """End every sequence of every instance silently: nobody is there to hear of them."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Post Woke at this instant. A later WakeAt replaces an earlier one."""

    at: Seconds


NodeAction = (
    StartEngine | BindEngine | UnbindEngine | KillEngine | AcquireCheckpoint | ReleaseCheckpoint | DeleteCheckpoint
    | SendStatus | AwaitDrain | FailSequences | AbortSequences | WakeAt
)  # fmt: skip

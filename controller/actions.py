"""What to do: the only output of ControllerCore. Every action says why in `reason`; outcomes come back as events."""

from dataclasses import dataclass

from nearline.controller.policy.plans import PlanGroup, PlanSlot
from nearline.protocol import CheckpointInfo, Digest, InstanceId, InstanceSpec, NodeId, RequestId, Seconds
from nearline.protocol.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to an instance as attempt number `attempt` (from 1), with the tokens it already has.

    `priority` ranks it inside the engine (smaller goes first), `predicted_tokens` is the answer expected in all.
    """

    request_id: RequestId
    instance_id: InstanceId
    node_id: NodeId
    attempt: int
    reason: str
    priority: int = 0
    predicted_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class AbortSequence:
    """Tell the instance to forget this request."""

    request_id: RequestId
    instance_id: InstanceId
    node_id: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class YieldPlace:
    """Let a running sequence give its place to those before it; it stays in its engine and goes on when it can."""

    request_id: RequestId
    instance_id: InstanceId
    node_id: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """End the request with an error. It is the request's last action; RequestRejected answers it if the request ran."""

    request_id: RequestId
    error: ErrorInfo
    reason: str


@dataclass(frozen=True, slots=True)
class EnsureInstance:
    """Run an instance on a node. `estimate_s` is how long its start should take, to be compared with the outcome."""

    spec: InstanceSpec
    node_id: NodeId
    estimate_s: Seconds
    reason: str


@dataclass(frozen=True, slots=True)
class StopInstance:
    """Drain an instance for at most `drain_s`, then stop it."""

    instance_id: InstanceId
    node_id: NodeId
    drain_s: Seconds
    reason: str


@dataclass(frozen=True, slots=True)
class Preload:
    """Read a checkpoint into a node's DRAM while its slot is still being freed."""

    node_id: NodeId
    digest: Digest
    reason: str


@dataclass(frozen=True, slots=True)
class CopyCheckpoint:
    """Copy a checkpoint to a node from those that have it; CheckpointImported or CopyFailed follows."""

    checkpoint: CheckpointInfo
    node_id: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class PrepareAdapter:
    """Have an instance read an adapter before its next request, if it has a place free; nothing depends on it."""

    instance_id: InstanceId
    node_id: NodeId
    digest: Digest
    reason: str


@dataclass(frozen=True, slots=True)
class DeleteCheckpoint:
    """No registered model or adapter refers to these bytes any more, and no request waits for them."""

    digest: Digest
    reason: str


@dataclass(frozen=True, slots=True)
class SolvePlan:
    """Look for a better plan than the one in force, off the event loop; answer with PlanSolved of the same version.

    Replaces every earlier SolvePlan: an answer to an older version changes nothing.
    """

    version: int
    groups: tuple[PlanGroup, ...]
    slots: tuple[PlanSlot, ...]
    time_limit_s: Seconds
    reason: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send Woke at this instant. Replaces every earlier WakeAt."""

    at: Seconds
    reason: str


Action = (
    Dispatch | AbortSequence | YieldPlace | Reject | EnsureInstance | StopInstance | Preload | CopyCheckpoint
    | PrepareAdapter
    | DeleteCheckpoint | SolvePlan | WakeAt
)  # fmt: skip

"""What happened: the only input of ControllerCore. Frozen, and free of text and tokens, so a journal may keep it."""

from dataclasses import dataclass, field

from nearline.controller.policy.plans import Plan
from nearline.protocol import (
    AdapterSpec,
    CheckpointInfo,
    Digest,
    FinishReason,
    InstanceStatus,
    ModelId,
    ModelSpec,
    NodeId,
    NodeReport,
    RequestId,
    Slo,
    TaskId,
    TenantId,
)
from nearline.protocol.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A request as decisions need it: lengths instead of tokens.

    `prefix_hash` is equal for prompts with equal first tokens (0: too short to matter).
    """

    request_id: RequestId
    model_id: ModelId
    num_prompt_tokens: int
    max_tokens: int
    tenant: TenantId = TenantId("default")
    slo: Slo = field(default_factory=Slo)
    adapter_id: ModelId | None = None
    adapter_digest: Digest | None = None
    prefix_hash: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ModelAdded:
    """A model may be called. The same name with another checkpoint: the old one drains, new requests go to the new."""

    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    model_id: ModelId


@dataclass(frozen=True, slots=True)
class AdapterAdded:
    spec: AdapterSpec


@dataclass(frozen=True, slots=True)
class AdapterRemoved:
    adapter_id: ModelId


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """First report on a fresh link. Whatever was sent on an earlier link of this node is void."""

    report: NodeReport


@dataclass(frozen=True, slots=True)
class NodeReported:
    report: NodeReport


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The link of a node broke. Its sequences are void at once, its instances after `node_grace_s`."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class CheckpointImported:
    """A node finished an import; its next report would say so, this says it now."""

    node_id: NodeId
    checkpoint: CheckpointInfo


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """A copy that CopyCheckpoint asked for did not come about."""

    node_id: NodeId
    digest: Digest
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class InstanceChanged:
    node_id: NodeId
    status: InstanceStatus


@dataclass(frozen=True, slots=True)
class RequestArrived:
    info: RequestInfo


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The caller is gone, or has seen enough (a stop string). `num_generated` counts all attempts together."""

    request_id: RequestId
    num_generated: int = 0


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """The outcome of Reject: how many tokens its caller has got, of all attempts together."""

    request_id: RequestId
    num_generated: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """First token of one attempt: the instance did not die of this request."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """An engine (or its node) ended an attempt. `num_generated` counts all attempts together."""

    request_id: RequestId
    attempt: int
    finish_reason: FinishReason
    num_generated: int = 0
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class MeasurementBegan:
    """The steps of a checkpoint are going to be measured: its instances stay awake until MeasurementEnded."""

    task_id: TaskId
    digest: Digest


@dataclass(frozen=True, slots=True)
class MeasurementEnded:
    """It is finished or has failed, or nobody waits for it any more."""

    task_id: TaskId
    digest: Digest


@dataclass(frozen=True, slots=True)
class PlanSolved:
    """The answer to SolvePlan of this version; None: nothing was found in time."""

    version: int
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class Woke:
    """The time named by the last WakeAt has come (or nearly; waking early is harmless)."""


Event = (
    ModelAdded | ModelRemoved | AdapterAdded | AdapterRemoved | NodeJoined | NodeReported | NodeLost
    | CheckpointImported | CopyFailed | InstanceChanged | RequestArrived | RequestCancelled | RequestRejected
    | FirstToken | SequenceEnded | MeasurementBegan | MeasurementEnded | PlanSolved | Woke
)  # fmt: skip

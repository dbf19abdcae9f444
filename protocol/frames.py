"""Every message between processes. One class, one meaning; the codec is wire.py.

Links: controller ⇄ node agent (WebSocket, one frame per message) and node agent ⇄ engine (Unix socket,
length-prefixed). A link is ordered and reliable while it lives; when it breaks, whatever was sent on it is
void: the agent aborts the sequences dispatched over a broken link, and the controller dispatches them again.
"""

from dataclasses import dataclass

from nearline.protocol.errors import ErrorInfo
from nearline.protocol.ids import Bytes, Digest, InstanceId, ModelId, RequestId, Seconds, TaskId
from nearline.protocol.instance import InstanceSpec, InstanceStatus, NodeReport
from nearline.protocol.model import CheckpointInfo, CheckpointKind, Extent
from nearline.protocol.request import Request, SequenceUpdate
from nearline.protocol.step_time import StepProfile

# ---- controller → node agent ----


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to the first NodeReport of a link: how often to report, and the fencing token of this leader.

    An agent ends the link of a leader whose token is below one it has obeyed in the same `deployment`.
    """

    report_interval_s: Seconds
    fencing_token: int
    deployment: str = ""


@dataclass(frozen=True, slots=True)
class EnsureInstance:
    """Run this instance. Idempotent: an id that already runs or has ended is answered with its status.

    `peers` are the HTTP addresses of nodes that hold the whole checkpoint, from which missing bytes may come.
    """

    spec: InstanceSpec
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StopInstance:
    """Drain for at most `drain_s`, then stop. Sequences still running then are aborted."""

    instance_id: InstanceId
    drain_s: Seconds


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a sequence. `generated_token_ids` were produced by earlier attempts and are not produced again.

    `predicted_tokens` is how many the request will probably generate in all, those included."""

    instance_id: InstanceId
    request: Request
    attempt: int
    generated_token_ids: tuple[int, ...] = ()
    predicted_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """End a sequence now; no further update is expected for it."""

    instance_id: InstanceId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Yield:
    """Let a running sequence give its place to the next one before it, in (priority, arrival); it goes on by itself
    when there is room again."""

    instance_id: InstanceId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class PrepareAdapter:
    """Have an adapter read before anybody asks for it, if the instance has a place free for it. Not answered, but for
    the instance's status once it is there; of an instance or adapter that is not on this node, nothing comes."""

    instance_id: InstanceId
    digest: Digest


@dataclass(frozen=True, slots=True)
class ImportCheckpoint:
    """Bring `source` into the node's store. An adapter names the checkpoint of its base."""

    task_id: TaskId
    kind: CheckpointKind
    source: str
    base_digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class CancelTask:
    """End a task nobody waits for: an import, a verification, a profile."""

    task_id: TaskId


@dataclass(frozen=True, slots=True)
class DeleteCheckpoint:
    """Forget the bytes of a checkpoint as soon as no instance uses them."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class Preload:
    """Read a checkpoint into DRAM ahead of use."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class EvictCheckpoint:
    """Give a checkpoint's DRAM back. Pinned chunks stay. With a task id, answered by TaskFinished (bytes freed)."""

    digest: Digest
    task_id: TaskId | None = None


@dataclass(frozen=True, slots=True)
class VerifyCheckpoint:
    """Read a checkpoint from SSD against its digests: TaskProgress, then TaskFinished or TaskFailed."""

    task_id: TaskId
    digest: Digest


@dataclass(frozen=True, slots=True)
class ProfileInstance:
    """Measure what steps of this instance's checkpoint take, between its requests: ProfileProgress, then
    ProfileFinished or TaskFailed. The agent hands it on to the engine."""

    task_id: TaskId
    instance_id: InstanceId


# ---- node agent → controller ----


@dataclass(frozen=True, slots=True)
class Report:
    report: NodeReport


@dataclass(frozen=True, slots=True)
class InstanceChanged:
    """Sent at every move of an instance's state, and again when its start timings are complete."""

    status: InstanceStatus


@dataclass(frozen=True, slots=True)
class Tokens:
    """Everything one engine step produced."""

    instance_id: InstanceId
    updates: tuple[SequenceUpdate, ...]


@dataclass(frozen=True, slots=True)
class TaskProgress:
    task_id: TaskId
    phase: str
    done_bytes: Bytes
    total_bytes: Bytes


@dataclass(frozen=True, slots=True)
class ImportFinished:
    task_id: TaskId
    checkpoint: CheckpointInfo


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A task has failed: an import, a verification, a profile."""

    task_id: TaskId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """A task on a checkpoint is over: the bytes it read or freed, and how long it took."""

    task_id: TaskId
    num_bytes: Bytes
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class ProfileProgress:
    """From the engine, passed on by the agent: steps measured so far."""

    task_id: TaskId
    phase: str
    done_steps: int
    total_steps: int


@dataclass(frozen=True, slots=True)
class ProfileFinished:
    """From the engine, passed on by the agent, which keeps the profile with the checkpoint."""

    task_id: TaskId
    profile: StepProfile


# ---- node agent → engine ----


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """How to map the DRAM pool: a memfd of `num_frames` frames, and a memfd of one ready byte per frame."""

    num_frames: int
    frame_bytes: Bytes


@dataclass(frozen=True, slots=True)
class Bind:
    """Become an instance: map these pool frames, in order, as the checkpoint's safetensors file.

    `manifest_path` names the checkpoint directory's manifest. The frames may still be filling; each one's
    ready byte says when. `max_running` bounds sequences decoded together, `kv_bytes` the KV cache. `profile` is what
    the checkpoint's steps were measured to take on this node.
    """

    spec: InstanceSpec
    manifest_path: str
    frames: tuple[int, ...]
    kv_bytes: Bytes
    max_running: int
    num_threads: int
    profile: StepProfile | None = None


@dataclass(frozen=True, slots=True)
class AdapterBytes:
    """An adapter's checkpoint file lies in these parts of the pool, one after another, its digests checked; without
    any, read its directory. They are lent for one read: until ExtentsFree gives `lease_id` back, or the process ends.
    """

    digest: Digest
    extents: tuple[Extent, ...]
    lease_id: int


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Make an adapter usable, from its checkpoint directory. Sent before the first Submit that names it.

    Answered by AdapterLoaded, as is each read after an AdapterEvicted. With `is_ahead` nobody asks for it yet: it is
    read when nothing else is, or not at all if no place is free. Of one that `is_pooled` the agent says for every read
    where its bytes are, here or when it is asked (AdapterWanted); without it the directory is read.
    """

    digest: Digest
    directory: str
    is_ahead: bool = False
    is_pooled: bool = False
    lent: AdapterBytes | None = None


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Free an adapter once no running sequence uses it."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class Unbind:
    """Abort what runs, free model and KV cache, unmap the frames and become pre-warmed again."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with Pong between two steps. An engine that does not for long is taken for hung and killed."""

    number: int


# ---- engine → node agent ----


@dataclass(frozen=True, slots=True)
class Pong:
    """`longest_step_s` is how long a step may take by what the engine has measured (0: it is not bound)."""

    number: int
    longest_step_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The process is pre-warmed: interpreter, torch, kernels and device context are up."""

    pid: int
    device: str
    warmup_s: Seconds


@dataclass(frozen=True, slots=True)
class Bound:
    """Views exist and requests may come; bytes may still be arriving. `bind_s` excludes waiting for bytes.

    `longest_step_s` is how long a step may take, as predicted before the first."""

    instance_id: InstanceId
    bind_s: Seconds
    kv_tokens_total: int
    longest_step_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class BindFailed:
    """The instance cannot be. It may also follow Bound, when bytes that arrive later turn out to be bad: then every
    sequence has ended with that error before, and the process exits next."""

    instance_id: InstanceId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class StepDone:
    """One engine step: tokens, ends, and the load after it."""

    updates: tuple[SequenceUpdate, ...]
    num_running: int
    num_waiting: int
    kv_tokens_used: int


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    digest: Digest
    load_s: Seconds
    num_bytes: Bytes
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class AdapterEvicted:
    """An adapter is no longer on the device. Whoever asks for it has it read again."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class AdapterWanted:
    """An adapter is about to be read: where are its bytes? Answered by AdapterBytes, when they are there."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class ExtentsFree:
    """What AdapterBytes lent is read, or not needed: this process never reads it again."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class FramesFree:
    """The device holds every byte of the checkpoint: this instance never reads the pool's frames again."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class Unbound:
    model_id: ModelId


ToAgent = (
    Welcome | EnsureInstance | StopInstance | Submit | Abort | Yield | PrepareAdapter | ImportCheckpoint
    | CancelTask | DeleteCheckpoint | Preload | EvictCheckpoint | VerifyCheckpoint | ProfileInstance
)  # fmt: skip
ToController = (
    Report | InstanceChanged | Tokens | TaskProgress | ImportFinished | TaskFailed | TaskFinished
    | ProfileProgress | ProfileFinished
)  # fmt: skip
ToEngine = (
    PoolLayout | Bind | Submit | Abort | Yield | LoadAdapter | AdapterBytes | UnloadAdapter | Unbind | Ping
    | ProfileInstance | CancelTask
)  # fmt: skip
FromEngine = (
    EngineReady | Bound | BindFailed | StepDone | AdapterLoaded | AdapterEvicted | AdapterWanted | ExtentsFree
    | Unbound | Pong | ProfileProgress | ProfileFinished | TaskFailed | FramesFree
)  # fmt: skip

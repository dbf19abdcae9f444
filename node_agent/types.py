"""Words of the node agent: an engine process, an instance and a device as NodeCore keeps them."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from nearline.protocol import (
    Bytes,
    CheckpointInfo,
    DeviceInfo,
    Digest,
    InstanceId,
    InstanceSpec,
    InstanceState,
    InstanceStatus,
    Seconds,
    StartTimings,
    Tier,
)
from nearline.protocol.errors import ErrorInfo

EngineId = NewType("EngineId", int)
"""Names one engine process of one agent's life; never used twice."""


class EngineState(StrEnum):
    """STARTING → IDLE ⇄ BINDING → BOUND → UNBINDING → IDLE; EXITING from any, until the process is reaped."""

    STARTING = "starting"
    IDLE = "idle"
    BINDING = "binding"
    BOUND = "bound"
    UNBINDING = "unbinding"
    EXITING = "exiting"


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """What NodeCore decides by. `kv_bytes` and `num_prewarmed` are per device; waits end in a kill or a failure."""

    devices: tuple[DeviceInfo, ...]
    num_prewarmed: int
    kv_bytes: Bytes
    max_running: int
    num_cores: int
    start_timeout_s: Seconds = 120.0
    bind_timeout_s: Seconds = 120.0
    unbind_timeout_s: Seconds = 5.0
    bytes_timeout_s: Seconds = 300.0
    quiet_delay_s: Seconds = 2.0
    backoff_s: Seconds = 0.25
    max_backoff_s: Seconds = 30.0
    max_start_failures: int = 3


@dataclass(slots=True, eq=False)
class Engine:
    """One engine process. `deadline` is when its current wait (start, bind, unbind) is given up.

    `is_faulty` makes a wanted end count as a failure all the same: the process never answered."""

    engine_id: EngineId
    device_index: int
    started_at: Seconds
    state: EngineState = EngineState.STARTING
    deadline: Seconds | None = None
    warm_at: Seconds | None = None
    is_faulty: bool = False
    instance_id: InstanceId | None = None


@dataclass(slots=True, eq=False)
class Instance:
    """One instance. It holds a slot and a pin of its checkpoint from the grant until no process maps its frames.

    `bytes_deadline` is when a start is given up whose bytes do not come any further."""

    spec: InstanceSpec
    checkpoint: CheckpointInfo | None
    state: InstanceState = InstanceState.PENDING
    has_slot: bool = False
    is_pinned: bool = False
    has_frames: bool = False
    granted_at: Seconds = 0.0
    bytes_deadline: Seconds | None = None
    is_prewarmed: bool = False
    engine_id: EngineId | None = None
    drain_deadline: Seconds | None = None
    max_running: int = 0
    kv_tokens_total: int = 0
    process_s: Seconds = 0.0
    bind_s: Seconds | None = None
    is_filled: bool = False
    read_s: Seconds = 0.0
    read_bytes: Bytes = 0
    tier: Tier = Tier.SSD
    adapters: dict[Digest, None] = field(default_factory=dict)
    error: ErrorInfo | None = None

    def status(self) -> InstanceStatus:
        """Describe the instance to the controller, without its load. Timings come once they are final."""
        timings = None
        if self.bind_s is not None and self.is_filled:
            timings = StartTimings(
                self.process_s, self.bind_s, self.read_s, self.read_bytes, self.tier, self.is_prewarmed
            )
        return InstanceStatus(
            self.spec.instance_id,
            self.spec.model_id,
            self.spec.digest,
            self.state,
            device_index=self.spec.device_index,
            max_running=self.max_running,
            kv_tokens_total=self.kv_tokens_total,
            adapter_digests=tuple(self.adapters),
            timings=timings,
            error=self.error,
        )


@dataclass(slots=True, eq=False)
class DeviceSlots:
    """One device's slots and its luck with processes: none starts before `retry_at`, spares stay until `quiet_at`."""

    info: DeviceInfo
    num_failures: int = 0
    retry_at: Seconds = 0.0
    quiet_at: Seconds = 0.0

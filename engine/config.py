"""What an engine is told about its sizes and habits. Pure words: nothing here is read from the environment."""

from dataclasses import dataclass
from enum import StrEnum

from nearline.protocol import Bytes, BytesPerSecond, Seconds, StepTimeModel


class PolicyName(StrEnum):
    """`fcfs`: by priority, then arrival. `shortest`: the shortest predicted answer first, within a wait bound.
    `mlfq`: skip-join multi-level feedback queue, which also takes places back from long answers."""

    FCFS = "fcfs"
    SHORTEST = "shortest"
    MLFQ = "mlfq"


class MergeMode(StrEnum):
    """When adapters run on weights they are merged into: `never`, `auto` (in steps of one adapter, once its copy was
    measured to pay), `always` (one at a time, in turns). Under `auto` neighbours may change tokens at near ties."""

    NEVER = "never"
    AUTO = "auto"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of one bound engine. Raises ValueError for sizes with which it could not make progress."""

    num_blocks: int
    """Blocks of the KV cache, ≥ 1."""
    block_size: int = 16
    """Positions per block."""
    max_running: int = 32
    """Sequences decoded together, ≥ 1."""
    max_step_tokens: int | None = 512
    """Most tokens of a step, > max_running so that prefills always advance; None: every prompt in one piece."""
    tpot_s: Seconds = 0.1
    """Target between tokens of interactive requests that name none: prompts are cut so that steps keep it."""
    step_time: StepTimeModel | None = None
    """What this device's steps were measured to take; None: guessed, then learned from the steps that run."""
    policy: PolicyName = PolicyName.FCFS
    """In which order sequences run."""
    wait_bound_s: Seconds = 10.0
    """Under `shortest`, the longest that anybody is overtaken."""
    future_share: float = 1.0
    """Share of its declared remaining tokens for which a sequence must find room when it is admitted, in [0, 1].
    1: decoding never runs out of blocks. Less: more sequences at once, and preemption when they all run long."""
    is_prefix_cached: bool = True
    """Whether the KV of finished or running sequences is reused for equal prefixes."""
    num_host_blocks: int = 0
    """Blocks in the host's memory that preempted sequences may move to."""
    block_bytes: Bytes = 1
    """Bytes of one block over all layers."""
    copy_bytes_per_s: BytesPerSecond = 4e9
    """Rate at which blocks move to the host or back, > 0."""
    merge: MergeMode = MergeMode.NEVER
    merge_bytes: Bytes = 0
    """Bytes of one merged copy, which are taken from the KV cache's; 0: nothing can be merged here."""
    merge_copies: int = 1
    """How many merged copies find room."""
    merge_max_wait_s: Seconds = 0.5
    """Under `always`, the longest turn of an adapter while others wait."""
    max_adapters: int = 128
    """Adapters on the device at once, ≥ 1."""
    max_adapter_bytes: Bytes = 1 << 30
    """Bytes of adapters on the device; one adapter is always allowed. Where `block_bytes` is known they come out of
    the KV cache's budget: as many free blocks stay unused, until somebody who waits needs them."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_running", "max_adapters"):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineConfig.{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_step_tokens is not None and self.max_step_tokens <= self.max_running:
            raise ValueError(
                f"EngineConfig.max_step_tokens is {self.max_step_tokens}; it must exceed max_running "
                f"({self.max_running}), or decoding sequences would leave no room for prompts"
            )
        if not 0.0 <= self.future_share <= 1.0:
            raise ValueError(f"EngineConfig.future_share is {self.future_share}; it must lie in [0, 1]")

    @property
    def kv_tokens(self) -> int:
        """Positions that the KV cache can hold."""
        return self.num_blocks * self.block_size

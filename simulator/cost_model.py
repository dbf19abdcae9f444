"""What things cost in virtual time: reading bytes, binding, engine steps. Numbers only, no policy. Pure."""

from dataclasses import dataclass, field
from functools import partial

from nearline.protocol import Bytes, Seconds, StepTimeModel

A10G_7B = StepTimeModel(
    prefill_base_s=0.0163,
    prefill_per_token_s=0.0002137,
    prefill_per_square_s=0.0,
    decode_base_s=0.0163,
    decode_per_context_s=0.000002018,
    decode_per_sequence_s=0.000245,
)
"""Source: [vtc] cost profile of Llama-2-7B on an A10G, least-squares fit (mean error 4 %): prefill 0.2137 ms per token,
step 16.30 ms + 0.245 ms per sequence + 0.002018 ms per context token. That a prefill reads the weights once, as a step
of decodes does, is ours: the profile gives prefill per request in large batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """One kind of machine with its usual model on it. `max_running` and `kv_tokens` are of one instance.

    `max_step_tokens` is the engine's budget of a step, `step_overhead_s` what a step costs beside the model,
    `hop_s` what lies between the controller's decision and an engine that has read it.
    """

    steps: StepTimeModel = A10G_7B
    ssd_bytes_per_s: float = 2.0e9
    dram_bytes_per_s: float = 12.0e9
    bind_s: Seconds = 0.1
    process_s: Seconds = 3.0
    stop_s: Seconds = 0.05
    max_running: int = 16
    kv_tokens: int = 65_536
    max_step_tokens: int | None = 512
    step_overhead_s: Seconds = 0.0
    hop_s: Seconds = 0.0

    def read_s(self, ssd_bytes: Bytes, dram_bytes: Bytes) -> Seconds:
        return ssd_bytes / self.ssd_bytes_per_s + dram_bytes / self.dram_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """A checkpoint on these machines. `steps` and `binds_s` were measured for it alone: its starts take these binds in
    turn. None, or none: what its machine says. `settle_s` is what an engine does once per bind, after a first second
    without work (the vocabulary of structured output), while neither steps nor a stop begin."""

    num_bytes: Bytes
    steps: StepTimeModel | None = None
    binds_s: tuple[Seconds, ...] = ()
    settle_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a node is made of. The DRAM pool gives whole frames, here larger than live ones: fewer things to count.

    `slowdown_beside` is for slots that share cores: by how much one that computes stretches the steps of another, as a
    part of what they take alone (measured; 0: each slot has cores or a device of its own)."""

    cost: CostModel = field(default_factory=partial(CostModel))
    num_devices: int = 1
    num_slots: int = 1
    num_prewarmed: int = 1
    dram_bytes: Bytes = 64 * 10**9
    frame_bytes: Bytes = 256 << 20
    weight_bytes: Bytes = 0
    slowdown_beside: float = 0.0

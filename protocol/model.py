"""What is registered: models, adapters and the checkpoints behind them. Immutable; a new version is a new value."""

from dataclasses import dataclass, field
from enum import StrEnum

from nearline.protocol.ids import Bytes, Digest, ModelId, Seconds
from nearline.protocol.request import Pooling, Slo


class CheckpointKind(StrEnum):
    MODEL = "model"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A stored checkpoint as the rest of the fleet needs to know it; the bytes stay on the nodes.

    `files` are the small text files beside the weights (tokenizer.json, config.json, chat_template.jinja …),
    fetched from any node that holds the checkpoint. `rank` and `base_digest` are an adapter's.
    """

    digest: Digest
    kind: CheckpointKind
    num_bytes: Bytes
    family: str
    architecture: str
    source: str
    dtype: str
    files: tuple[str, ...]
    max_context_tokens: int = 0
    vocab_size: int = 0
    kv_bytes_per_token: Bytes = 0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    base_digest: Digest | None = None
    rank: int = 0
    quantization: str = ""
    """Format of the weights, int8 or int4, if they were quantised when they were imported."""
    quantization_error: float = 0.0
    """What that lost: √(Σ(stored - original)² / Σ original²) over all quantised weights."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Some neighbouring bytes of a node's DRAM pool."""

    offset: Bytes
    num_bytes: Bytes


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model people may call. Idle instances stop `keep_alive_s` after their last request (negative: never).

    With `keep_alive_min_s` that time is learned from the model's own calls, between the two. `pooling` is how its
    embeddings are made, and `slo` what its requests are promised, when a request does not say.
    """

    model_id: ModelId
    checkpoint: CheckpointInfo
    created_at: float
    keep_alive_s: Seconds = 300.0
    min_replicas: int = 0
    max_replicas: int = 1
    pooling: Pooling = Pooling.LAST
    slo: Slo = field(default_factory=Slo)
    keep_alive_min_s: Seconds | None = None


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA adapter people may call by its own id or as `base:adapter`."""

    adapter_id: ModelId
    base_id: ModelId
    checkpoint: CheckpointInfo
    created_at: float

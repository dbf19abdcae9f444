"""Joins the merging policy to the steps: who may run in the next one, and whose copy should be made. Pure."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from nearline.engine.config import EngineConfig, MergeMode
from nearline.engine.merging import AlwaysMerged, MergeDecision, MergeLimits, MergeMeter, MergePolicy
from nearline.engine.sequence import Sequence
from nearline.engine.types import Batch
from nearline.protocol import Bytes, Digest, Seconds

_EXTRA_SHARE = 0.05
"""An adapter's weights over the base's, guessed: rank 16 on all projections of a small model."""
_COPY_BYTES_PER_S = 2e9
_MOST_COPIES = 8

MayRun = Callable[[Sequence], bool]


class MergeTurns:
    """Decides before each step whether it is merged. `wanted`: the adapter of which a copy should be made meanwhile."""

    def __init__(self, config: EngineConfig) -> None:
        limits = MergeLimits(max_wait_s=config.merge_max_wait_s)
        self._meter = MergeMeter(_EXTRA_SHARE, config.merge_bytes / _COPY_BYTES_PER_S)
        is_always = config.merge is MergeMode.ALWAYS
        self._policy = (
            AlwaysMerged(limits, config.merge_copies)
            if is_always
            else MergePolicy(self._meter.costs, limits, config.merge_copies)
        )
        self.wanted: Digest | None = None

    def schedule(
        self, runnable: Seq[Sequence], now: Seconds, schedule: Callable[[Seconds, MayRun | None], Batch | None]
    ) -> Batch | None:
        """Put the next step together by `schedule`, which asks who may run (None: everybody).

        Whoever's turn it is and still cannot run, because others hold the blocks, is passed over.
        """
        counts: dict[Digest | None, int] = {}
        for sequence in runnable:
            counts[sequence.request.adapter_digest] = counts.get(sequence.request.adapter_digest, 0) + 1
        while True:
            decision = self._policy.decide(counts, now)
            self.wanted = decision.wanted
            batch = schedule(now, _may_run(decision))
            if batch is not None:
                return replace(batch, merged=decision.merged)
            if decision.wanted is not None or not counts:
                return None
            if decision.merged is None and not decision.is_base_only:
                return None
            del counts[decision.merged]

    def measured(self, batch: Batch, seconds: Seconds, predicted_s: Seconds) -> None:
        """Take in a step's time: decoding steps of one adapter, or of the base alone, tell what merging saves."""
        if predicted_s <= 0.0 or batch.work.num_prefill_tokens:
            return
        adapters = list(dict.fromkeys(item.sequence.request.adapter_digest for item in batch.items))
        if len(adapters) == 1:
            self._meter.step(batch.merged is not None or adapters[0] is None, seconds / predicted_s)
            self._policy.costs = self._meter.costs

    @property
    def kept(self) -> tuple[Digest, ...]:
        """The adapters whose merged copies are kept."""
        return self._policy.kept

    def copy_made(self, adapter: Digest, seconds: Seconds) -> None:
        """Take in that this adapter's copy is whole, and what making it took."""
        self._policy.copy_made(adapter)
        self.wanted = None
        self._meter.copy(seconds)
        self._policy.costs = self._meter.costs


def num_merged_copies(kv_bytes: Bytes, copy_bytes: Bytes) -> int:
    """How many merged copies find room in half of the budget of the KV cache."""
    return min(_MOST_COPIES, kv_bytes // 2 // copy_bytes)


def merge_refusal(kv_bytes: Bytes, copy_bytes: Bytes) -> str | None:
    """Say why not one merged copy finds room in half of the budget of the KV cache; None if it does."""
    if num_merged_copies(kv_bytes, copy_bytes):
        return None
    return f"a merged copy takes {copy_bytes} bytes, more than half of the {kv_bytes} that the KV cache may take"


def _may_run(decision: MergeDecision) -> MayRun | None:
    if decision.merged is not None or decision.is_base_only:
        return lambda sequence: sequence.request.adapter_digest == decision.merged
    return None

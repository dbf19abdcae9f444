"""Joins the merging policy to the steps: which are merged, who may run in them, whose copy should be made. Pure."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from nearline.engine.config import EngineConfig, MergeMode
from nearline.engine.merge_meter import MergeMeter
from nearline.engine.merging import AloneMerged, AlwaysMerged
from nearline.engine.sequence import Sequence
from nearline.engine.types import Batch
from nearline.protocol import Bytes, Digest, Seconds, StepTimeModel

_COPY_BYTES_PER_S = 2e9
_MOST_COPIES = 8

MayRun = Callable[[Sequence], bool]
Schedule = Callable[[Seconds, MayRun | None], Batch | None]
"""Puts a step together; it is told who may run (None: everybody)."""


class MergeTurns:
    """Decides before each step whether it is merged. `wanted`: the adapter whose copy should be made meanwhile.

    `is_there`: whether an adapter is on the device, so that it can be merged.
    """

    def __init__(self, config: EngineConfig, believed: StepTimeModel, is_there: Callable[[Digest], bool]) -> None:
        self._is_there = is_there
        self._meter = MergeMeter(believed, config.merge_bytes / _COPY_BYTES_PER_S)
        self._policy: AloneMerged | AlwaysMerged = (
            AlwaysMerged(config.merge_max_wait_s, config.merge_copies)
            if config.merge is MergeMode.ALWAYS
            else AloneMerged(self._meter.costs, config.merge_copies)
        )
        self.wanted: Digest | None = None

    def schedule(self, runnable: Seq[Sequence], now: Seconds, schedule: Schedule) -> Batch | None:
        """Put the next step together. `runnable`: sequences that run or could start."""
        if isinstance(self._policy, AlwaysMerged):
            return self._in_turns(self._policy, runnable, now, schedule)
        batch = schedule(now, None)
        if batch is not None:
            adapters = list(dict.fromkeys(item.sequence.request.adapter_digest for item in batch.items))
            alone = adapters[0] if len(adapters) == 1 else None
            if alone is not None and self._policy.alone(alone):
                batch = replace(batch, merged=alone)
        self.wanted = self._policy.to_copy(batch is None, self._is_there)
        return batch

    def _in_turns(
        self, policy: AlwaysMerged, runnable: Seq[Sequence], now: Seconds, schedule: Schedule
    ) -> Batch | None:
        """Whoever's turn it is and still cannot run, because others hold the blocks, is passed over."""
        left = dict.fromkeys(sequence.request.adapter_digest for sequence in runnable)
        while True:
            merged = policy.decide(left, now).merged
            self.wanted = policy.copies.wanted
            batch = schedule(now, _of(merged))
            if batch is not None:
                return replace(batch, merged=merged)
            if self.wanted is not None or not left:
                return None
            del left[merged]

    def measured(self, batch: Batch, seconds: Seconds) -> None:
        """Take in a step's time."""
        self._meter.step(batch, seconds)
        if isinstance(self._policy, AloneMerged):
            self._policy.costs = self._meter.costs

    @property
    def kept(self) -> tuple[Digest, ...]:
        """The adapters whose merged copies are kept."""
        return self._policy.copies.kept

    def copy_made(self, adapter: Digest, seconds: Seconds) -> None:
        """Take in that this adapter's copy is whole, and what making it took."""
        self._policy.copy_made(adapter)
        self.wanted = None
        self._meter.copy(seconds)


def num_merged_copies(kv_bytes: Bytes, copy_bytes: Bytes) -> int:
    """How many merged copies find room in half of the budget of the KV cache."""
    return min(_MOST_COPIES, kv_bytes // 2 // copy_bytes)


def merge_refusal(kv_bytes: Bytes, copy_bytes: Bytes) -> str | None:
    """Say why not one merged copy finds room in half of the budget of the KV cache; None if it does."""
    if num_merged_copies(kv_bytes, copy_bytes):
        return None
    return f"a merged copy takes {copy_bytes} bytes, more than half of the {kv_bytes} that the KV cache may take"


def _of(adapter: Digest | None) -> MayRun:
    return lambda sequence: sequence.request.adapter_digest == adapter

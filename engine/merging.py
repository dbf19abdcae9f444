"""When one adapter should run on weights it is merged into, alone, while the others wait. Pure.

Merged weights are a private copy beside the base's, so going back costs nothing and restores nothing; only making the
copy has a price. Credits are displaced seconds: an adapter gains one for each second its sequences could have run and
did not, and pays it back by running. Stated bound: nobody who can run waits longer than `max_wait_s` and one step, and
nobody runs less than half of the time from then on. Off until a measurement of this machine says what merging saves.
Source: dLoRA (merged and unmerged batches, credits), with another scale: the published constants let a lone request
wait for many minutes. Source: ski rental (buy when the rent paid equals the price: at most twice the best cost).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nearline.protocol import Digest, Seconds


@dataclass(frozen=True, slots=True)
class MergeCosts:
    """What was measured: `speed` is the seconds of a merged step over those of an unmerged one (1: nothing gained),
    `merge_s` the work of making one copy."""

    speed: float = 1.0
    merge_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class MergeLimits:
    """`min_saving`: the least share of a step that merging must save; `max_wait_s`: the longest displacement."""

    min_saving: float = 0.1
    max_wait_s: Seconds = 0.5


@dataclass(frozen=True, slots=True)
class MergeDecision:
    """Whom the next step serves: sequences of `merged` alone, on merged weights; or all, unmerged (None)."""

    merged: Digest | None
    reason: str


class MergePolicy:
    """Decides step by step. `clock`: the caller's `now` never goes backwards; it asks before every step."""

    def __init__(self, costs: MergeCosts, limits: MergeLimits = MergeLimits()) -> None:
        self._costs, self._limits = costs, limits
        self._credits: dict[Digest | None, Seconds] = {}
        self._merged: Digest | None = None
        self._copied: Digest | None = None
        self._rented: tuple[Digest | None, Seconds] = (None, 0.0)
        self._last_at: Seconds | None = None

    @property
    def copied(self) -> Digest | None:
        """The adapter whose merged copy is kept."""
        return self._copied

    def credit(self, adapter: Digest | None) -> Seconds:
        """Seconds of displacement an adapter (None: the base) has not been paid back."""
        return self._credits.get(adapter, 0.0)

    def decide(self, runnable: Mapping[Digest | None, int], now: Seconds) -> MergeDecision:
        """Choose the mode of the next step for `runnable` sequences by adapter. Who is not runnable has no credit."""
        self._settle(runnable, now)
        merged, reason = self._choose(runnable)
        if merged is not None:
            self._copied = merged
        self._merged = merged
        return MergeDecision(merged, reason)

    def _settle(self, runnable: Mapping[Digest | None, int], now: Seconds) -> None:
        """Book the time since the last decision: displaced or paid back, and the rent of not merging."""
        passed = 0.0 if self._last_at is None else now - self._last_at
        self._last_at = now
        self._credits = {adapter: self.credit(adapter) for adapter in runnable}
        for adapter in runnable:
            if self._merged is None:
                self._credits[adapter] = max(0.0, self._credits[adapter] - passed)
            elif adapter != self._merged:
                self._credits[adapter] += passed
        dominant = self._dominant(runnable)
        renter, rent = self._rented
        saved = passed * (1.0 - self._costs.speed) if self._merged is None else 0.0
        self._rented = (dominant, rent + saved if dominant is not None and dominant == renter else 0.0)

    def _choose(self, runnable: Mapping[Digest | None, int]) -> tuple[Digest | None, str]:
        if 1.0 - self._costs.speed < self._limits.min_saving:
            return None, "merging saves too little here"
        dominant = self._dominant(runnable)
        if dominant is None:
            return None, "no adapter dominates"
        owed = max((self._credits[adapter] for adapter in runnable if adapter != dominant), default=0.0)
        if self._merged == dominant and owed >= self._limits.max_wait_s:
            return None, "displaced for as long as is allowed"
        if self._merged != dominant and owed > 0.0:
            return None, "the displaced are paid back"
        if self._copied != dominant and self._rented[1] < self._costs.merge_s:
            return None, "not yet worth a copy"
        return dominant, "one adapter dominates"

    def _dominant(self, runnable: Mapping[Digest | None, int]) -> Digest | None:
        """The adapter for which displacing all others still gains: its share of the batch exceeds the merged speed."""
        total = sum(runnable.values())
        for adapter, count in runnable.items():
            if adapter is not None and count > total * self._costs.speed:
                return adapter
        return None

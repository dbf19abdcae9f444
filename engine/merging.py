"""When one adapter should run on weights it is merged into, alone, while the others wait. Pure.

Merged weights are private copies beside the base's, one for each of a few adapters, so going back costs nothing and
restores nothing, and an adapter that is alone in a step runs merged wherever its copy is there. Only making a copy has
a price; it is made beside unmerged steps once the adapter has dominated them for long enough in all. Credits are
displaced seconds: an adapter gains one for each second its sequences could have run and did not, and pays it back by
running. Stated bound: nobody who can run waits longer than `max_wait_s` and one step, and nobody runs less than half of
the time from then on.
Source: dLoRA (merged and unmerged batches, credits), with another scale: the published constants let a lone request
wait for many minutes. Source: ski rental (buy when the rent paid equals the price: at most twice the best cost).

Exactness. The weights of the copy are rounded, which unmerged steps do not do, so near ties may fall otherwise. NEVER
and ALWAYS compute every token of an adapter in one way, whoever its neighbours are: tokens in a batch equal those
alone. AUTO does not: which steps were merged depends on who else was there. It is therefore chosen, never a default.
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

    min_saving: float = 0.02
    max_wait_s: Seconds = 0.5


@dataclass(frozen=True, slots=True)
class MergeDecision:
    """Whom the next step serves: sequences of `merged` alone, on merged weights; or all, unmerged (None).

    `wanted`: the adapter of which a copy should be made meanwhile. `is_base_only`: of the others only the base's own
    sequences may run.
    """

    merged: Digest | None
    reason: str
    wanted: Digest | None = None
    is_base_only: bool = False


class MergedCopies:
    """Which copies are whole and kept: at most `most` with the one being made; the least recently used one leaves."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._whole: list[Digest] = []

    @property
    def kept(self) -> tuple[Digest, ...]:
        """Whose copies are kept, least recently used first."""
        return tuple(self._whole)

    def use(self, adapter: Digest) -> None:
        """Note that a step runs on this copy."""
        self._whole.remove(adapter)
        self._whole.append(adapter)

    def begin(self) -> None:
        """Make room for one that is being made: it is written over the one that leaves, from the first layer on."""
        del self._whole[: len(self._whole) + 1 - self._most]

    def made(self, adapter: Digest) -> None:
        """Take in that this adapter's copy is whole."""
        if adapter not in self._whole:
            self.begin()
            self._whole.append(adapter)


class MergePolicy:
    """Decides step by step. `clock`: the caller's `now` never goes backwards; it asks before every step, and says by
    `copy_made` when a copy is there. `costs` may be set again as more is measured."""

    def __init__(self, costs: MergeCosts, limits: MergeLimits = MergeLimits(), max_copies: int = 1) -> None:
        self.costs, self._limits = costs, limits
        self._credits: dict[Digest | None, Seconds] = {}
        self._merged: Digest | None = None
        self._copies = MergedCopies(max_copies)
        self._renter: Digest | None = None
        self._rents: dict[Digest, Seconds] = {}
        self._last_at: Seconds | None = None

    @property
    def kept(self) -> tuple[Digest, ...]:
        """The adapters whose merged copies are kept, least recently used first."""
        return self._copies.kept

    def copy_made(self, adapter: Digest) -> None:
        """Take in that this adapter's copy is whole."""
        self._rents.pop(adapter, None)
        self._copies.made(adapter)

    def credit(self, adapter: Digest | None) -> Seconds:
        """Seconds of displacement an adapter (None: the base) has not been paid back."""
        return self._credits.get(adapter, 0.0)

    def decide(self, runnable: Mapping[Digest | None, int], now: Seconds) -> MergeDecision:
        """Choose the mode of the next step for `runnable` sequences by adapter. Who is not runnable has no credit."""
        self._settle(runnable, now)
        chosen, reason = self._choose(runnable)
        self._merged = chosen if chosen in self.kept else None
        if self._merged is not None:
            self._copies.use(self._merged)
        elif chosen is not None:
            self._copies.begin()
            return MergeDecision(None, "its copy is being made", wanted=chosen)
        return MergeDecision(self._merged, reason)

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
        if self._renter is not None:
            rent = self._rents.pop(self._renter, 0.0) + passed * (1.0 - self.costs.speed)
            self._rents[self._renter] = rent
            if len(self._rents) > _MOST_RENTS:
                del self._rents[next(iter(self._rents))]
        self._renter = None

    def _choose(self, runnable: Mapping[Digest | None, int]) -> tuple[Digest | None, str]:
        alone = next(iter(runnable)) if len(runnable) == 1 else None
        if alone in self.kept:
            return alone, "it is alone and its copy is there"
        if 1.0 - self.costs.speed < self._limits.min_saving:
            return None, "merging saves too little here"
        dominant = self._dominant(runnable)
        if dominant is None:
            return None, "no adapter dominates"
        if dominant not in self.kept:
            self._renter = dominant
            if self._rents.get(dominant, 0.0) < self.costs.merge_s:
                return None, "not yet worth a copy"
        owed = max((self._credits[adapter] for adapter in runnable if adapter != dominant), default=0.0)
        if self._merged == dominant and owed >= self._limits.max_wait_s:
            return None, "displaced for as long as is allowed"
        if self._merged != dominant and owed > 0.0:
            return None, "the displaced are paid back"
        return dominant, "one adapter dominates"

    def _dominant(self, runnable: Mapping[Digest | None, int]) -> Digest | None:
        """The adapter for which displacing all others still gains: its share of the batch exceeds the merged speed."""
        total = sum(runnable.values())
        for adapter, count in runnable.items():
            if adapter is not None and count > total * self.costs.speed:
                return adapter
        return None


class AlwaysMerged:
    """Every adapter's steps are merged, one adapter at a time, in turns; the base's own sequences take turns too.

    Stated bound: who can run waits at most (n - 1) · (`max_wait_s` + the time of a copy) and one step, n being those
    who take turns. The door is MergePolicy's.
    """

    def __init__(self, limits: MergeLimits = MergeLimits(), max_copies: int = 1) -> None:
        self.costs = MergeCosts()
        self._limits = limits
        self._copies = MergedCopies(max_copies)
        self._turn: Digest | None = None
        self._until: Seconds = 0.0
        self._waiting_since: dict[Digest | None, Seconds] = {}

    @property
    def kept(self) -> tuple[Digest, ...]:
        """The adapters whose merged copies are kept, least recently used first."""
        return self._copies.kept

    def copy_made(self, adapter: Digest) -> None:
        """Take in that this adapter's copy is whole."""
        self._copies.made(adapter)

    def decide(self, runnable: Mapping[Digest | None, int], now: Seconds) -> MergeDecision:
        """Choose whose turn it is among those with `runnable` sequences."""
        self._waiting_since = {adapter: self._waiting_since.get(adapter, now) for adapter in runnable}
        if not runnable:
            return MergeDecision(None, "nobody can run", is_base_only=True)
        others = [adapter for adapter in runnable if adapter != self._turn]
        if self._turn not in runnable or (others and now >= self._until):
            self._turn = min(others, key=lambda adapter: (self._waiting_since[adapter], adapter or ""))
            self._until = now + self._limits.max_wait_s
        self._waiting_since[self._turn] = now
        if self._turn is None:
            return MergeDecision(None, "the base's turn", is_base_only=True)
        if self._turn not in self.kept:
            self._until = now + self._limits.max_wait_s  # a turn begins when its copy is there
            self._copies.begin()
            return MergeDecision(None, "its copy is being made", wanted=self._turn, is_base_only=True)
        self._copies.use(self._turn)
        return MergeDecision(self._turn, "its turn")


class MergeMeter:
    """What merged and unmerged steps of one adapter cost on this device, as far as measured.

    A step counts by its time over the time predicted for such a step, whatever its size. The base's own steps stand for
    merged ones, which have the same shapes.
    """

    def __init__(self, extra_share: float, merge_s: Seconds) -> None:
        """Begin with a guess: an adapter of `extra_share` of the base's weights costs twice that in time."""
        self._slow, self._fast = 1.0 + 2.0 * extra_share, 1.0
        self._merge_s = merge_s

    @property
    def costs(self) -> MergeCosts:
        return MergeCosts(speed=min(1.0, self._fast / self._slow), merge_s=self._merge_s)

    def step(self, is_merged: bool, ratio: float) -> None:
        """Take in one decoding step of one adapter, or of the base alone: its time over the predicted one."""
        if is_merged:
            self._fast += _FADE * (min(ratio, _MOST) - self._fast)
        else:
            self._slow += _FADE * (min(ratio, _MOST) - self._slow)

    def copy(self, seconds: Seconds) -> None:
        """Take in what a whole copy took."""
        self._merge_s += 0.5 * (seconds - self._merge_s)


_FADE, _MOST = 0.05, 4.0
_MOST_RENTS = 256
"""Adapters whose rent is remembered: of more, who dominated longest ago is forgotten."""

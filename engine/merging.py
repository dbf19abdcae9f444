"""Which steps run on weights that an adapter is merged into, and which adapters get such weights. Pure.

Merged weights are private copies beside the base's, one for each of a few adapters, so going back costs nothing and
restores nothing. Two policies:
- AloneMerged (`auto`): a step that serves one adapter only, because nobody else can run, is merged if that adapter's
  copy is there. Stated bound: nobody ever waits for a merged step. A copy is made once the time it would have saved
  pays for making it; a share of that is enough while nothing can run.
- AlwaysMerged (`always`): one adapter at a time, in turns of bounded length.
Source: dLoRA (merged and unmerged batches). It also holds others back while one adapter dominates; that pays where a
merged step takes half the time of an unmerged one, and it stalls whoever is decoding. Source: ski rental (buy when the
rent paid equals the price: at most twice the best cost).

Exactness. The weights of the copy are rounded, which unmerged steps do not do, so near ties may fall otherwise. NEVER
and ALWAYS compute every token of an adapter in one way, whoever its neighbours are: tokens in a batch equal those
alone. AUTO does not: which steps were merged depends on who else was there. It is therefore chosen, never a default.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from nearline.protocol import Digest, Seconds

IDLE_SHARE = 0.25
"""Of a copy's price: rent for which it is made while nothing can run, when it delays nobody here."""
_MOST_RENTS = 256
"""Adapters whose rent is remembered: of more, who paid longest ago is forgotten."""


@dataclass(frozen=True, slots=True)
class MergeCosts:
    """What was measured: `saving_s` is what a step of one adapter takes longer than a merged one, `merge_s` the work
    of making one copy."""

    saving_s: Seconds
    merge_s: Seconds


class MergedCopies:
    """Which copies are whole and kept: at most `most` with the one being made; the least recently used one leaves.

    `wanted` is the adapter whose copy is being made. What is begun is finished, or others' beginnings would undo it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._whole: list[Digest] = []
        self.wanted: Digest | None = None

    @property
    def kept(self) -> tuple[Digest, ...]:
        """Whose copies are kept, least recently used first."""
        return tuple(self._whole)

    def use(self, adapter: Digest) -> None:
        """Note that a step runs on this copy."""
        self._whole.remove(adapter)
        self._whole.append(adapter)

    def begin(self, adapter: Digest) -> None:
        """Make room for a copy of one that has none: it is written over the one that leaves, from the first layer."""
        self.wanted = adapter
        del self._whole[: max(0, len(self._whole) + 1 - self._most)]

    def give_up(self) -> None:
        """Leave the copy that is being made as it is."""
        self.wanted = None

    def made(self, adapter: Digest) -> None:
        """Take in that this adapter's copy is whole."""
        if adapter not in self._whole:
            self.begin(adapter)
            self._whole.append(adapter)
        self.wanted = None


class AloneMerged:
    """Merges the steps of whoever is alone. `costs` may be set again as more is measured."""

    def __init__(self, costs: MergeCosts, max_copies: int = 1) -> None:
        self.costs = costs
        self.copies = MergedCopies(max_copies)
        self._rents: dict[Digest, Seconds] = {}

    def alone(self, adapter: Digest) -> bool:
        """Take in that the next step serves this adapter only. Returns whether it runs merged."""
        if adapter in self.copies.kept:
            self.copies.use(adapter)
            return True
        self._rents[adapter] = self._rents.pop(adapter, 0.0) + self.costs.saving_s
        if len(self._rents) > _MOST_RENTS:
            del self._rents[next(iter(self._rents))]
        return False

    def to_copy(self, is_idle: bool, is_there: Callable[[Digest], bool]) -> Digest | None:
        """Say whose copy to go on with now, if anybody's. `is_idle`: nothing can run; `is_there`: on the device."""
        if self.copies.wanted is not None and not is_there(self.copies.wanted):
            self.copies.give_up()
        missed = [adapter for adapter in self._rents if is_there(adapter)]
        most = max(missed, key=lambda adapter: self._rents[adapter], default=None)
        price_s = self.costs.merge_s * (IDLE_SHARE if is_idle else 1.0)
        if most is None or self._rents[most] < price_s:
            return None
        if self.copies.wanted is None:
            self.copies.begin(most)
        return self.copies.wanted

    def copy_made(self, adapter: Digest) -> None:
        """Take in that this adapter's copy is whole."""
        self.copies.made(adapter)
        self._rents.pop(adapter, None)


@dataclass(frozen=True, slots=True)
class Turn:
    """Whom the next step serves: sequences of `merged` alone, on merged weights, or the base's own (None)."""

    merged: Digest | None
    reason: str


class AlwaysMerged:
    """Every adapter's steps are merged, one adapter at a time, in turns; the base's own sequences take turns too.

    `clock`: the caller's `now` never goes backwards; it asks before every step. Stated bound: who can run waits at most
    (n - 1) · (`max_wait_s` + the time of a copy) and one step, n being those who take turns.
    """

    def __init__(self, max_wait_s: Seconds = 0.5, max_copies: int = 1) -> None:
        self._max_wait_s = max_wait_s
        self.copies = MergedCopies(max_copies)
        self._turn: Digest | None = None
        self._until: Seconds = 0.0
        self._waiting_since: dict[Digest | None, Seconds] = {}

    def decide(self, runnable: Collection[Digest | None], now: Seconds) -> Turn:
        """Choose whose turn it is among those who can run (None: the base's own). Its copy may have to be made."""
        self._waiting_since = {adapter: self._waiting_since.get(adapter, now) for adapter in runnable}
        self.copies.give_up()
        if not runnable:
            return Turn(None, "nobody can run")
        others = [adapter for adapter in runnable if adapter != self._turn]
        if self._turn not in runnable or (others and now >= self._until):
            self._turn = min(others, key=lambda adapter: (self._waiting_since[adapter], adapter or ""))
            self._until = now + self._max_wait_s
        self._waiting_since[self._turn] = now
        if self._turn is None:
            return Turn(None, "the base's turn")
        if self._turn not in self.copies.kept:
            self._until = now + self._max_wait_s  # a turn begins when its copy is there
            self.copies.begin(self._turn)
            return Turn(None, "its copy is being made")
        self.copies.use(self._turn)
        return Turn(self._turn, "its turn")

    def copy_made(self, adapter: Digest) -> None:
        """Take in that this adapter's copy is whole."""
        self.copies.made(adapter)

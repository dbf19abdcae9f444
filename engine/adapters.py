"""Which adapters are on the device, which should be, and for whom. Pure.

An adapter is addressed by its content digest alone, so loading one can never change what another sequence
computes. Its life: ABSENT → LOADING → READY → ABSENT (evicted, may come back) or gone (unloaded); LOADING → FAILED.
A sequence *joins* its adapter when it is added and *pins* it from its first step to its end: a pinned adapter is
not evicted, a joined one is not forgotten. Of those that may go, the one goes whose absence is expected to cost least.

An adapter may be read *ahead* of its first sequence, while nothing else is read and into a place that is free: it takes
nothing from anybody, and goes before all that were ever used.
"""

import math
from bisect import insort
from dataclasses import dataclass, field
from enum import StrEnum

from nearline.engine.sequence import Order, Sequence
from nearline.protocol import Bytes, Digest, Seconds
from nearline.protocol.errors import ErrorInfo, NearlineError, NotFound

USE_HALF_LIFE_S: Seconds = 600.0
"""A use counts half as much after this long."""
READ_COST_BYTES: Bytes = 1 << 20
"""What opening and placing an adapter costs whatever its size, as the bytes that could be read meanwhile."""


class AdapterState(StrEnum):
    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """Read the adapter and report `loaded` or `failed`."""

    digest: Digest
    directory: str


@dataclass(frozen=True, slots=True)
class FreeAdapter:
    """Free the adapter's tensors; nothing uses them."""

    digest: Digest


AdapterAction = ReadAdapter | FreeAdapter


@dataclass(slots=True)
class _Adapter:
    digest: Digest
    directory: str
    state: AdapterState = AdapterState.ABSENT
    num_bytes: Bytes = 0
    joined: list[Order] = field(default_factory=list)
    num_pinned: int = 0
    is_wanted: bool = False
    is_ahead: bool = False
    """To be read ahead; `is_wanted` says the same of one that somebody asks for."""
    is_leaving: bool = False
    heat: float = -math.inf
    ready_since: Seconds = 0.0
    error: ErrorInfo | None = None

    @property
    def is_placed(self) -> bool:
        return self.state in (AdapterState.LOADING, AdapterState.READY)

    def use(self, now: Seconds) -> None:
        """Count one use.

        `heat` is the binary logarithm of the decayed number of uses as seen from time zero, so that adapters compare
        alike at every later moment: each use at time t adds 2^(t / half-life) to what it is the logarithm of.
        """
        one = now / USE_HALF_LIFE_S
        low, high = sorted((one, self.heat))
        self.heat = high + math.log2(1.0 + 2.0 ** (low - high))

    def cost_of_absence(self, is_per_byte: bool) -> float:
        """Expected cost of being without it, as a logarithm: uses × bytes to read, for its place or for each byte."""
        cost = math.log2(READ_COST_BYTES + self.num_bytes)
        return self.heat + cost - (math.log2(max(self.num_bytes, 1)) if is_per_byte else 0.0)


class AdapterTable:
    """Decides what to read and what to free within `max_adapters` and `max_bytes`.

    Sequences of different adapters compete for places in their own order: an adapter whose oldest sequence waits
    takes the place of an unpinned one whose sequences are all newer. When every place is pinned, the adapter that
    has been on the device longest *yields* (all do when bytes, not places, are short): its newer sequences do not
    start, so its pins run out. Hence the oldest sequence always gets its adapter, and two adapters never evict
    each other in turns without progress.
    """

    def __init__(self, max_adapters: int, max_bytes: Bytes) -> None:
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self._adapters: dict[Digest, _Adapter] = {}
        self._yielding: list[Digest] = []
        self._yields_to: Order | None = None
        self._is_squeezed = False
        self._just_read: list[Digest] = []

    def announce(self, digest: Digest, directory: str, is_ahead: bool = False) -> bool:
        """Make an adapter known and wanted, also after a failure. Returns whether it is ready already.

        With `is_ahead` nobody has asked for it: it is read once there is nothing else to read, if a place is free then.
        """
        adapter = self._adapters.get(digest)
        if adapter is None or adapter.state is AdapterState.FAILED:
            adapter = self._adapters[digest] = _Adapter(digest, directory)
        adapter.directory, adapter.is_leaving = directory, False
        adapter.is_wanted = adapter.is_wanted or not is_ahead
        adapter.is_ahead = is_ahead and adapter.state is AdapterState.ABSENT
        return adapter.state is AdapterState.READY

    def retire(self, digest: Digest) -> None:
        """Forget an adapter as soon as no sequence needs it; new sequences may not join it. Unknown: nothing."""
        if digest in self._adapters:
            self._adapters[digest].is_leaving = True

    def problem(self, digest: Digest) -> NearlineError | None:
        """Say why a sequence may not join this adapter."""
        adapter = self._adapters.get(digest)
        if adapter is None or adapter.is_leaving:
            return NotFound(f"adapter {digest} is not loaded on this instance; it must be loaded before its requests")
        return adapter.error.exception() if adapter.error else None

    def join(self, sequence: Sequence) -> bool:
        """Count in a sequence that will need its adapter. Returns whether the adapter is ready now."""
        adapter = self._of(sequence)
        if adapter is None:
            return True
        insort(adapter.joined, sequence.order)
        adapter.is_wanted = True
        return adapter.state is AdapterState.READY

    def leave(self, sequence: Sequence, now: Seconds) -> None:
        """Count out a sequence that has ended."""
        adapter = self._of(sequence)
        if adapter is not None:
            adapter.joined.remove(sequence.order)
            adapter.num_pinned -= sequence.is_adapter_pinned
            adapter.use(now)
            sequence.is_adapter_pinned = False

    def can_start(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may run in the next step, as far as its adapter is concerned."""
        adapter = self._of(sequence)
        if adapter is None or sequence.is_adapter_pinned:
            return True
        if adapter.digest in self._yielding and self._yields_to is not None and sequence.order > self._yields_to:
            return False
        return adapter.state is AdapterState.READY

    def is_ready(self, digest: Digest) -> bool:
        """Whether an adapter is on the device, needed or not."""
        return digest in self._adapters and self._adapters[digest].state is AdapterState.READY

    def is_placed(self, digest: Digest) -> bool:
        """Whether an adapter is on the device or being read."""
        return digest in self._adapters and self._adapters[digest].is_placed

    def pin(self, sequence: Sequence) -> None:
        """Keep the adapter of a sequence that starts on the device until the sequence ends."""
        adapter = self._of(sequence)
        if adapter is not None and not sequence.is_adapter_pinned:
            adapter.num_pinned += 1
            sequence.is_adapter_pinned = True

    def loaded(self, digest: Digest, num_bytes: Bytes, now: Seconds) -> None:
        """Record that a read has ended well."""
        adapter = self._adapters[digest]
        adapter.state, adapter.num_bytes = AdapterState.READY, num_bytes
        adapter.ready_since = now
        if adapter.is_wanted:
            adapter.heat = max(adapter.heat, now / USE_HALF_LIFE_S)  # somebody wanted it now
            self._just_read.append(digest)

    def failed(self, digest: Digest, error: ErrorInfo) -> None:
        """Remember why an adapter cannot be used. The caller ends its sequences; a new `announce` tries again."""
        adapter = self._adapters[digest]
        adapter.state, adapter.error, adapter.is_wanted = AdapterState.FAILED, error, False

    def plan(self, may_read_ahead: bool = True) -> list[AdapterAction]:
        """Decide what to free and what to read now.

        1. Forget what was retired and is no longer needed.
        2. While the adapters on the device take more than `max_bytes`, evict those that no sequence joined, but one:
           what has just been read, last.
        3. Read what is wanted: first for the oldest sequence, then as announced. Without a place, evict an adapter
           that no sequence joined, else an unpinned one whose sequences are all newer; without one, the adapter that
           has been there longest yields.
        4. If nothing is read and nobody waits, read one ahead; without a free place none of those that should be is.
        Who is evicted among several: the one whose absence costs least, by `cost_of_absence`, per byte where bytes
        are short.
        """
        actions: list[AdapterAction] = []
        for adapter in [a for a in self._adapters.values() if a.is_leaving and not a.joined]:
            if adapter.state is not AdapterState.LOADING:
                actions += [FreeAdapter(adapter.digest)] if adapter.is_placed else []
                del self._adapters[adapter.digest]
        if self._is_squeezed and (squeezed := self._victim(None, is_per_byte=True)) is not None:
            actions.append(self._evict(squeezed))
        self._is_squeezed = False
        while self._placed_bytes() > self._max_bytes and self._num_placed() > 1:
            if (victim := self._victim(None, is_per_byte=True)) is None:
                break
            actions.append(self._evict(victim))
        self._just_read.clear()
        self._yielding, self._yields_to = [], None
        for adapter in sorted(self._absent(), key=lambda a: (not a.joined, a.joined[:1])):
            while not self._has_place(adapter) and (victim := self._victim(adapter, not self._is_full())):
                actions.append(self._evict(victim))
            if self._has_place(adapter):
                adapter.state = AdapterState.LOADING
                actions.append(ReadAdapter(adapter.digest, adapter.directory))
            elif adapter.joined and self._yields_to is None and not self._is_reading_ahead():
                self._yields_to = adapter.joined[0]
                ready = [a for a in self._adapters.values() if a.state is AdapterState.READY]
                ready.sort(key=lambda a: a.ready_since)
                self._yielding = [a.digest for a in (ready[:1] if self._is_full() else ready)]
        return actions + (self._read_ahead() if may_read_ahead else [])

    @property
    def is_squeezed(self) -> bool:
        """Whether the next `plan` gives up an adapter for somebody who waits for blocks."""
        return self._is_squeezed

    def squeeze(self) -> bool:
        """Give up the cheapest adapter per byte that no sequence needs, at the next `plan`. False: there is none."""
        self._is_squeezed = self._victim(None, is_per_byte=True) is not None
        return self._is_squeezed

    def check(self) -> None:
        """Assert the invariants."""
        assert self._num_placed() <= self._max_adapters, "more adapters than places"
        for adapter in self._adapters.values():
            assert 0 <= adapter.num_pinned <= len(adapter.joined), "pins and joins do not balance"
            assert not adapter.num_pinned or adapter.state is AdapterState.READY, "a pinned adapter is not ready"
            assert not adapter.joined or adapter.state is not AdapterState.FAILED, "a failed adapter has sequences"

    def _of(self, sequence: Sequence) -> _Adapter | None:
        digest = sequence.request.adapter_digest
        return None if digest is None else self._adapters[digest]

    def _absent(self) -> list[_Adapter]:
        return [a for a in self._adapters.values() if a.is_wanted and a.state is AdapterState.ABSENT]

    def _read_ahead(self) -> list[AdapterAction]:
        ahead = [a for a in self._adapters.values() if a.is_ahead and a.state is AdapterState.ABSENT]
        placed = [a for a in self._adapters.values() if a.is_placed]
        if not ahead or self._absent() or any(a.state is AdapterState.LOADING for a in placed):
            return []
        first = ahead[0]
        size = first.num_bytes or max((a.num_bytes for a in placed), default=0)  # unknown: as large as the largest
        if self._is_full() or self._placed_bytes() + size > self._max_bytes:
            for adapter in ahead:
                adapter.is_ahead = False
            return []
        first.state, first.is_ahead = AdapterState.LOADING, False
        return [ReadAdapter(first.digest, first.directory)]

    def _is_reading_ahead(self) -> bool:
        """Whether a read that nobody asked for is about to end, and its place to be had."""
        return any(a.state is AdapterState.LOADING and not a.is_wanted for a in self._adapters.values())

    def _has_place(self, adapter: _Adapter) -> bool:
        is_small_enough = self._placed_bytes() + adapter.num_bytes <= self._max_bytes
        return self._num_placed() == 0 or (not self._is_full() and is_small_enough)

    def _is_full(self) -> bool:
        return self._num_placed() >= self._max_adapters

    def _victim(self, wanting: _Adapter | None, is_per_byte: bool) -> _Adapter | None:
        ready = [a for a in self._adapters.values() if a.state is AdapterState.READY and not a.num_pinned]
        unjoined = [a for a in ready if not a.joined]
        newer = [a for a in ready if wanting and wanting.joined and a.joined > wanting.joined]

        def cost(adapter: _Adapter) -> tuple[bool, float, Seconds]:
            return adapter.digest in self._just_read, adapter.cost_of_absence(is_per_byte), -adapter.ready_since

        return min(unjoined or newer, key=cost, default=None)

    def _evict(self, adapter: _Adapter) -> FreeAdapter:
        adapter.state = AdapterState.ABSENT
        adapter.is_wanted, adapter.is_ahead = bool(adapter.joined), False
        return FreeAdapter(adapter.digest)

    def _num_placed(self) -> int:
        return sum(a.is_placed for a in self._adapters.values())

    def _placed_bytes(self) -> Bytes:
        return sum(a.num_bytes for a in self._adapters.values() if a.is_placed)

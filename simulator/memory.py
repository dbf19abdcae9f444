"""A simulated node's checkpoints: the store's own DRAM tier over one serial storage link. Pure.

What is evicted for whom is decided by checkpoint_store/tiers.py; here is only how long the reads take.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nearline.checkpoint_store import DramTier
from nearline.protocol import Bytes, Digest, Residency, Seconds, Tier
from nearline.simulator.cost_model import Machine, SimulatedModel


@dataclass(frozen=True, slots=True)
class Read:
    """What bringing a checkpoint in takes, from now, and the chunks it reads."""

    seconds: Seconds
    num_bytes: Bytes
    tier: Tier
    chunks: tuple[int, ...]


class NodeMemory:
    """All checkpoints lie on this node's disk. Raises OutOfMemory where the store would."""

    def __init__(self, machine: Machine, models: Mapping[Digest, SimulatedModel]) -> None:
        self._machine = machine
        self._models = models
        self._rows = {d: Residency(d, m.num_bytes, m.num_bytes, 0) for d, m in models.items()}
        self._tuple: tuple[Residency, ...] | None = None
        self.clear()

    def clear(self) -> None:
        """Lose all of DRAM."""
        self._tier = DramTier(self._machine.dram_bytes // self._machine.frame_bytes)
        self._known: dict[Digest, None] = {}
        self._full_at: dict[Digest, Seconds] = {}
        self._link_free_at: Seconds = 0.0
        for digest in self._rows:
            self._refresh(digest)

    @property
    def free_bytes(self) -> Bytes:
        return self._tier.num_free * self._machine.frame_bytes

    def pin(self, digest: Digest, now: Seconds, may_stream: bool = False) -> Read:
        """Hold a checkpoint in DRAM and begin to read what is missing, behind the reads before it."""
        cost, num_bytes = self._machine.cost, self._models[digest].num_bytes
        if digest not in self._known:
            self._tier.register(digest, num_bytes, self._machine.frame_bytes, 1.0 / cost.ssd_bytes_per_s)
            self._known[digest] = None
        resident = self._tier.resident_bytes(digest)
        admission = self._tier.pin(digest, now, may_stream)
        for eviction in admission.evictions:
            self._refresh(eviction.digest)
        missing = num_bytes - resident if admission.to_read or not admission.frames else 0
        if missing:
            self._link_free_at = max(now, self._link_free_at) + cost.read_s(missing, 0)
            self._full_at[digest] = self._link_free_at
        wait_s = max(0.0, self._full_at.get(digest, now) - now)
        copy_s = cost.read_s(0, num_bytes if not wait_s else resident)
        tier = Tier.SSD if wait_s else Tier.DRAM
        self._refresh(digest)
        return Read(wait_s + copy_s, missing, tier, admission.to_read)

    def arrived(self, digest: Digest, chunks: tuple[int, ...]) -> None:
        """Count a read as done."""
        for index in chunks:
            self._tier.finish(digest, index)
        self._refresh(digest)

    def unpin(self, digest: Digest) -> None:
        self._tier.unpin(digest)
        self._refresh(digest)

    def residency(self) -> tuple[Residency, ...]:
        if self._tuple is None:
            self._tuple = tuple(self._rows.values())
        return self._tuple

    def _refresh(self, digest: Digest) -> None:
        known, size = digest in self._known, self._models[digest].num_bytes
        dram = self._tier.resident_bytes(digest) if known else 0
        is_pinned = known and self._tier.is_pinned(digest)
        row = self._rows[digest]
        if (row.dram_bytes, row.is_pinned) != (dram, is_pinned):
            self._rows[digest] = Residency(digest, size, size, dram, is_pinned)
            self._tuple = None

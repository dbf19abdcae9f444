"""Which checkpoints give their place on SSD up when an import needs it. Pure.

Only what its source can give back may go, and nothing that is in use: the least expected cost per byte first, which is
the seconds to fetch a byte again × how often the checkpoint is used, as in DRAM (`tiers.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nearline.protocol import Bytes, Digest
from nearline.protocol.errors import StorageFull

_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """One checkpoint on SSD. `value` is the expected cost per byte of not having it; `source` is for people."""

    digest: Digest
    num_bytes: Bytes
    source: str
    is_fetchable: bool
    is_in_use: bool
    value: float


@dataclass(slots=True, eq=False)
class Room:
    """Place on SSD that one import has been promised, of which it has filled some."""

    num_bytes: Bytes
    written_bytes: Bytes = 0

    @property
    def unwritten_bytes(self) -> Bytes:
        return max(self.num_bytes - self.written_bytes, 0)


def free_bytes(disk_free_bytes: Bytes, budget_left_bytes: Bytes | None, rooms: Sequence[Room]) -> Bytes:
    """What nobody has and nobody has been promised: the lesser of what is left of the budget, if there is one, and of
    the disk. What an import has written is gone from the disk, but counts for the budget only when it is committed."""
    free = disk_free_bytes - sum(room.unwritten_bytes for room in rooms)
    if budget_left_bytes is not None:
        free = min(free, budget_left_bytes - sum(room.num_bytes for room in rooms))
    return max(0, free)


def choose_evictions(
    stored: Sequence[StoredCheckpoint], needed_bytes: Bytes, free_bytes: Bytes, budget_bytes: Bytes
) -> tuple[Digest, ...]:
    """Name the checkpoints that must leave so that `needed_bytes` fit; none if they fit now.

    Raises StorageFull with the numbers and with what a person could remove, when even all that may go is not enough.
    """
    short = needed_bytes - free_bytes
    if short <= 0:
        return ()
    candidates = [one for one in stored if one.is_fetchable and not one.is_in_use]
    evictable_bytes = sum(one.num_bytes for one in candidates)
    if evictable_bytes < short:
        raise _storage_full(stored, needed_bytes, (free_bytes, evictable_bytes, budget_bytes))
    chosen = []
    for one in sorted(candidates, key=lambda c: (c.value, -c.num_bytes, c.digest)):
        chosen.append(one)
        short -= one.num_bytes
        if short <= 0:
            break
    for one in list(chosen):  # a large one that came last may have made earlier ones needless
        if short + one.num_bytes <= 0:
            chosen.remove(one)
            short += one.num_bytes
    return tuple(one.digest for one in chosen)


def _storage_full(
    stored: Sequence[StoredCheckpoint], needed_bytes: Bytes, space: tuple[Bytes, Bytes, Bytes]
) -> StorageFull:
    free_bytes, evictable_bytes, budget_bytes = space
    kept = [one for one in stored if not one.is_fetchable or one.is_in_use]
    named = ", ".join(
        f"{one.source} ({one.num_bytes} bytes{', in use' if one.is_in_use else ''})"
        for one in sorted(kept, key=lambda c: (-c.num_bytes, c.digest))[:_MAX_NAMED]
    )
    missing_bytes = needed_bytes - free_bytes - evictable_bytes
    return StorageFull(
        f"the import needs {needed_bytes} bytes; of the store's {budget_bytes}, {free_bytes} are free and "
        f"{evictable_bytes} can be fetched again and so be evicted. {missing_bytes} bytes more would have to go: "
        f"remove one of {named or 'nothing, the budget is too small'}, or raise the budget "
        "(`nearline node --ssd-budget`)"
    )

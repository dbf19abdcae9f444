"""Which chunks are in DRAM, in which frames, who pins them and which go first. Pure.

A checkpoint is pinned as a whole; a chunk is read once however many ask for it; eviction takes the chunks whose
absence costs least: seconds to bring back a byte × how often the checkpoint is used, last chunks first, so that what
stays is the part a start needs first. Small ones may share frames (packing.py): those are worth what they hold.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from nearline.checkpoint_store.packing import Packs
from nearline.checkpoint_store.types import CHUNK_BYTES
from nearline.protocol import Bytes, Digest, Extent, Seconds
from nearline.protocol.errors import OutOfMemory

_USE_HALF_LIFE_S: Seconds = 600.0
"""A use counts half as much after this long."""


class ChunkState(Enum):
    ABSENT = "absent"
    READING = "reading"
    RESIDENT = "resident"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Eviction:
    """`num_chunks` of a checkpoint lost their place to somebody else."""

    digest: Digest
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A pin was granted: the frame of every chunk in order, the chunks the caller must read now, and who paid.

    A packed checkpoint has no frames but an extent, which holds its only chunk.
    """

    frames: tuple[int, ...]
    to_read: tuple[int, ...]
    evictions: tuple[Eviction, ...]
    reason: str
    extent: Extent | None = None


@dataclass(slots=True)
class _Held:
    """One checkpoint's chunks in DRAM. Frames (packed: the extent) are kept while a chunk is not ABSENT."""

    digest: Digest
    num_bytes: Bytes
    chunk_bytes: Bytes
    bring_back_s_per_byte: float
    states: list[ChunkState]
    frames: list[int]
    is_packed: bool = False
    pins: int = 0
    num_resident: int = 0
    uses: float = 0.0
    used_at: Seconds = 0.0
    pinned_frames: tuple[int, ...] | None = field(default=None)

    def value(self, now: Seconds) -> float:
        """Expected cost, per byte, of not having this checkpoint's chunks."""
        return self.bring_back_s_per_byte * self.decayed_uses(now)

    def decayed_uses(self, now: Seconds) -> float:
        return self.uses * math.pow(0.5, max(now - self.used_at, 0.0) / _USE_HALF_LIFE_S)

    def count_use(self, now: Seconds) -> None:
        self.uses, self.used_at = self.decayed_uses(now) + 1.0, max(now, self.used_at)

    def last_resident(self, most: int) -> list[int]:
        """The last resident chunks, at most so many."""
        return [i for i in range(len(self.states) - 1, -1, -1) if self.states[i] is ChunkState.RESIDENT][:most]

    def loss(self, now: Seconds) -> float | None:
        """Expected cost of not having a packed checkpoint; None while it cannot go."""
        return None if self.pins or not self.num_resident else self.value(now) * self.num_bytes

    def count(self, state: ChunkState) -> int:
        return self.num_resident if state is ChunkState.RESIDENT else self.states.count(state)


class DramTier:
    """The pool's frames and the chunks in them. Every frame is free, a pack, or holds exactly one chunk; the chunks of
    a pinned checkpoint keep their places until it is unpinned; a chunk being read keeps its place until the read ends.
    """

    def __init__(self, num_frames: int, frame_bytes: Bytes = CHUNK_BYTES) -> None:
        self.num_frames = num_frames
        self._frame_bytes = frame_bytes
        self._free = list(range(num_frames - 1, -1, -1))  # a stack: used (so touched) frames are used again first
        self._held: dict[Digest, _Held] = {}
        self._packs = Packs(frame_bytes)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Frames that a checkpoint in want of frames may take from others."""
        resident = sum(h.num_resident for h in self._held.values() if not h.pins and not h.is_packed)
        return resident + sum(self._pack_value(frame, 0.0) is not None for frame in self._packs.frames)

    @property
    def num_draining(self) -> int:
        """Places that become evictable by themselves: of reads nobody waits for, and of packed checkpoints, whose pins
        are short."""
        return sum(h.is_packed if h.pins else h.count(ChunkState.READING) for h in self._held.values())

    def register(
        self,
        digest: Digest,
        num_bytes: Bytes,
        chunk_bytes: Bytes,
        bring_back_s_per_byte: float = 1.0,
        may_pack: bool = False,
    ) -> None:
        """Make a checkpoint known. Known already: only its cost is updated. `may_pack`: its holders need no frame of
        its own; then it is packed if it is one chunk that fits a frame."""
        if digest in self._held:
            self._held[digest].bring_back_s_per_byte = bring_back_s_per_byte
            return
        num_chunks = -(-num_bytes // chunk_bytes)
        states, frames = [ChunkState.ABSENT] * num_chunks, [-1] * num_chunks
        is_packed = may_pack and num_chunks == 1 and num_bytes <= self._frame_bytes
        self._held[digest] = _Held(digest, num_bytes, chunk_bytes, bring_back_s_per_byte, states, frames, is_packed)

    def forget(self, digest: Digest) -> bool:
        """Drop a checkpoint and free its frames; False while it is pinned or being read."""
        held = self._held[digest]
        if held.pins or held.count(ChunkState.READING):
            return False
        self.evict(digest)
        del self._held[digest]
        return True

    def pin(self, digest: Digest, now: Seconds, may_stream: bool = False) -> Admission:
        """Hold a checkpoint in DRAM, giving every chunk a frame; evict others for it when frames are short.

        `may_stream`: one with more chunks than the pool has frames is held without any, for a holder that reads the
        file itself. Raises OutOfMemory, changing nothing, when it cannot fit beside what is pinned.
        """
        held = self._held[digest]
        if may_stream and len(held.states) > self.num_frames:
            return self._pin_outside(held, now)
        if held.is_packed:
            return self._pin_packed(held, now)
        missing = [] if held.pinned_frames else [i for i, s in enumerate(held.states) if s is ChunkState.ABSENT]
        evictions = self._make_room(held, len(missing), now)
        for index in missing:
            held.frames[index] = self._free.pop()
            held.states[index] = ChunkState.READING
        held.count_use(now)
        held.pins += 1
        if held.pinned_frames is None:
            held.pinned_frames = tuple(held.frames)
        reason = f"{len(missing)} of {len(held.states)} chunks to read{_told(evictions)}"
        return Admission(held.pinned_frames, tuple(missing), evictions, reason)

    def unpin(self, digest: Digest) -> bool:
        """Undo one pin; True when it was the last, after which unread chunks should be dropped."""
        held = self._held[digest]
        assert held.pins > 0, f"{digest} is not pinned"
        held.pins -= 1
        if held.pins:
            return False
        held.pinned_frames = None
        self._free_chunks(held, [i for i, s in enumerate(held.states) if s is ChunkState.FAILED])
        return True

    def finish(self, digest: Digest, index: int) -> None:
        """A chunk's bytes have arrived."""
        held = self._held[digest]
        assert held.states[index] is ChunkState.READING
        held.states[index] = ChunkState.RESIDENT
        held.num_resident += 1

    def fail(self, digest: Digest, indices: Iterable[int]) -> None:
        """Chunks could not be read. They stay failed while pinned, so that no pin holder sees another's bytes."""
        held = self._held[digest]
        for index in indices:
            assert held.states[index] is ChunkState.READING
            held.states[index] = ChunkState.FAILED
            if not held.pins:
                self._free_chunks(held, [index])

    def drop(self, digest: Digest, indices: Iterable[int]) -> None:
        """Reads were cancelled before they started: their frames are free again. Only when nobody pins them."""
        held = self._held[digest]
        assert not held.pins, f"{digest} is pinned"
        self._free_chunks(held, [i for i in indices if held.states[i] is ChunkState.READING])

    def evict(self, digest: Digest) -> int:
        """Free the frames of a checkpoint's resident chunks unless it is pinned; return how many."""
        held = self._held[digest]
        if held.pins:
            return 0
        return self._free_chunks(held, [i for i, s in enumerate(held.states) if s is ChunkState.RESIDENT])

    def pending(self, digest: Digest) -> list[int]:
        """Chunks being read, in order."""
        held = self._held[digest]
        if held.num_resident == len(held.states):
            return []
        return [i for i, s in enumerate(held.states) if s is ChunkState.READING]

    def has_failed(self, digest: Digest) -> bool:
        held = self._held[digest]
        return held.num_resident < len(held.states) and ChunkState.FAILED in held.states

    def value(self, digest: Digest, now: Seconds) -> float:
        """Expected cost, per byte, of not having a checkpoint's chunks."""
        return self._held[digest].value(now)

    def is_pinned(self, digest: Digest) -> bool:
        return self._held[digest].pins > 0

    def is_packed(self, digest: Digest) -> bool:
        return self._held[digest].is_packed

    def is_pack(self, frame: int) -> bool:
        """Whether several checkpoints may lie in this frame."""
        return self._packs.has(frame)

    def resident_bytes(self, digest: Digest) -> Bytes:
        held = self._held[digest]
        if not held.num_resident:
            return 0
        full = held.num_resident * held.chunk_bytes
        is_last_resident = held.states[-1] is ChunkState.RESIDENT
        return full - (len(held.states) * held.chunk_bytes - held.num_bytes) * is_last_resident

    def check(self) -> None:
        """Assert the invariants of the class docstring."""
        self._packs.check()
        frames, packed = [*self._free, *self._packs.frames], []
        for held in self._held.values():
            packed += [held.digest] if held.is_packed and held.states[0] is not ChunkState.ABSENT else []
            for state, frame in zip(held.states, held.frames, strict=True):
                assert (state is ChunkState.ABSENT or held.is_packed) == (frame == -1)
                frames += [] if frame == -1 else [frame]
            assert held.num_resident == held.states.count(ChunkState.RESIDENT)
            assert held.pins >= 0
            assert held.pins or ChunkState.FAILED not in held.states
            assert bool(held.pins) == (held.pinned_frames is not None)
            if held.pinned_frames is not None:
                has_no_frames = held.is_packed or len(held.states) > self.num_frames
                assert held.pinned_frames == (() if has_no_frames else tuple(held.frames))
        assert sorted(packed) == sorted(d for frame in self._packs.frames for d in self._packs.contents(frame))
        assert sorted(frames) == list(range(self.num_frames)), "a frame is lost or held twice"

    def _pin_outside(self, held: _Held, now: Seconds) -> Admission:
        held.count_use(now)
        held.pins += 1
        held.pinned_frames = ()
        reason = f"{len(held.states)} chunks, {self.num_frames} frames: streamed past the pool"
        return Admission((), (), (), reason)

    def _pin_packed(self, held: _Held, now: Seconds) -> Admission:
        is_missing = held.states[0] is ChunkState.ABSENT
        evictions = self._place(held, now) if is_missing else ()
        if is_missing:
            held.states[0] = ChunkState.READING
        held.count_use(now)
        held.pins += 1
        held.pinned_frames = ()
        reason = f"packed, {int(is_missing)} of 1 chunks to read{_told(evictions)}"
        return Admission((), (0,) if is_missing else (), evictions, reason, self._packs.extent(held.digest))

    def _place(self, held: _Held, now: Seconds) -> tuple[Eviction, ...]:
        """Give a packed checkpoint an extent: in a hole, a free frame, or where the loss is least."""
        if self._placed(held):
            return ()
        window = self._packs.cheapest_window(held.num_bytes, lambda digest: self._held[digest].loss(now))
        chunks = [h for h in self._held.values() if not h.pins and h.num_resident and not h.is_packed]
        victim = min(chunks, key=lambda h: (h.value(now), h.digest), default=None)
        if window and (victim is None or window.loss <= victim.value(now) * self._frame_bytes):
            evictions = tuple(Eviction(digest, self.evict(digest)) for digest in window.digests)
        elif victim:
            evictions = (Eviction(victim.digest, self._free_chunks(victim, victim.last_resident(1))),)
        else:
            raise self._out_of_memory(held, 1)
        assert self._placed(held)
        return evictions

    def _placed(self, held: _Held) -> bool:
        if self._packs.place(held.digest, held.num_bytes):
            return True
        if self._free:
            self._packs.open(self._free.pop(), held.digest, held.num_bytes)
            return True
        return False

    def _make_room(self, wanted: _Held, num_missing: int, now: Seconds) -> tuple[Eviction, ...]:
        short = num_missing - len(self._free)
        if short <= 0:
            return ()
        victims: list[tuple[float, Digest, tuple[_Held, ...]]] = [
            (h.value(now), h.digest, (h,))
            for h in self._held.values()
            if not h.pins and h.num_resident and h is not wanted and not h.is_packed
        ]
        for frame in self._packs.frames:
            contents = tuple(self._held[digest] for digest in self._packs.contents(frame))
            if (value := self._pack_value(frame, now)) is not None:
                victims.append((value, contents[0].digest, contents))
        if short > sum(1 if held[0].is_packed else held[0].num_resident for _, _, held in victims):
            raise self._out_of_memory(wanted, num_missing)
        evictions = []
        for _, _, held in sorted(victims, key=lambda v: v[:2]):
            num_free = len(self._free)
            evictions += [Eviction(h.digest, self._free_chunks(h, h.last_resident(short))) for h in held]
            short -= len(self._free) - num_free
            if not short:
                break
        return tuple(evictions)

    def _pack_value(self, frame: int, now: Seconds) -> float | None:
        """What a pack frame is worth per byte; None while something in it cannot go."""
        losses = [self._held[digest].loss(now) for digest in self._packs.contents(frame)]
        known = [loss for loss in losses if loss is not None]
        return sum(known) / self._frame_bytes if len(known) == len(losses) else None

    def _out_of_memory(self, wanted: _Held, num_missing: int) -> OutOfMemory:
        total = len(wanted.states)
        if total > self.num_frames:
            return OutOfMemory(
                f"checkpoint {wanted.digest} has {total} chunks ({wanted.num_bytes} bytes), the whole DRAM pool has "
                f"{self.num_frames} frames; give the node a larger pool, or run it on a "
                "device with memory of its own, to which it is streamed"
            )
        pinned = ", ".join(f"{h.digest} ({len(h.states)})" for h in self._held.values() if h.pins) or "nothing"
        own = 0 if wanted.pins or wanted.is_packed else wanted.num_resident
        return OutOfMemory(
            f"checkpoint {wanted.digest} needs {num_missing} more frames; of the pool's {self.num_frames}, "
            f"{len(self._free)} are free, {self.num_evictable - own} can be evicted, and pinned by running models are: "
            f"{pinned}. Stop one of them or give the node a larger pool"
        )

    def _free_chunks(self, held: _Held, indices: list[int]) -> int:
        for index in indices:
            held.num_resident -= held.states[index] is ChunkState.RESIDENT
            held.states[index] = ChunkState.ABSENT
            frame = self._packs.remove(held.digest) if held.is_packed else held.frames[index]
            held.frames[index] = -1
            if frame is not None:
                self._free.append(frame)
        return len(indices)


def _told(evictions: tuple[Eviction, ...]) -> str:
    return "; evicted " + ", ".join(f"{e.num_chunks} of {e.digest}" for e in evictions) if evictions else ""

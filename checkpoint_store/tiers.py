"""Which chunks are in DRAM, in which frames, who pins them and which go first. Pure.

A checkpoint is pinned as a whole; a chunk is read once however many ask for it; eviction takes the chunks whose
absence costs least: seconds to bring back a byte × how often the checkpoint is used, last chunks first, so that what
stays is the part a start needs first.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from nearline.protocol import Bytes, Digest, Seconds
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
    """`num_chunks` of a checkpoint lost their frames to somebody else."""

    digest: Digest
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A pin was granted: the frame of every chunk in order, the chunks the caller must read now, and who paid."""

    frames: tuple[int, ...]
    to_read: tuple[int, ...]
    evictions: tuple[Eviction, ...]
    reason: str


@dataclass(slots=True)
class _Held:
    """One checkpoint's chunks in DRAM. Frames are kept while a chunk is not ABSENT."""

    digest: Digest
    num_bytes: Bytes
    chunk_bytes: Bytes
    bring_back_s_per_byte: float
    states: list[ChunkState]
    frames: list[int]
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

    def count(self, state: ChunkState) -> int:
        return self.num_resident if state is ChunkState.RESIDENT else self.states.count(state)


class DramTier:
    """The pool's frames and the chunks in them. Every frame is free or holds exactly one chunk; the chunks of a pinned
    checkpoint keep their frames until it is unpinned; a chunk being read keeps its frame until the read ends."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self._free = list(range(num_frames - 1, -1, -1))  # a stack: used (so touched) frames are used again first
        self._held: dict[Digest, _Held] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return sum(h.num_resident for h in self._held.values() if not h.pins)

    @property
    def num_draining(self) -> int:
        """Frames nobody wants whose read has not ended yet; they become evictable by themselves."""
        return sum(h.count(ChunkState.READING) for h in self._held.values() if not h.pins)

    def register(
        self, digest: Digest, num_bytes: Bytes, chunk_bytes: Bytes, bring_back_s_per_byte: float = 1.0
    ) -> None:
        """Make a checkpoint known. Known already: only its cost is updated."""
        if digest in self._held:
            self._held[digest].bring_back_s_per_byte = bring_back_s_per_byte
            return
        num_chunks = -(-num_bytes // chunk_bytes)
        states, frames = [ChunkState.ABSENT] * num_chunks, [-1] * num_chunks
        self._held[digest] = _Held(digest, num_bytes, chunk_bytes, bring_back_s_per_byte, states, frames)

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
        missing = [] if held.pinned_frames else [i for i, s in enumerate(held.states) if s is ChunkState.ABSENT]
        evictions = self._make_room(held, len(missing), now)
        for index in missing:
            held.frames[index] = self._free.pop()
            held.states[index] = ChunkState.READING
        held.count_use(now)
        held.pins += 1
        if held.pinned_frames is None:
            held.pinned_frames = tuple(held.frames)
        reason = f"{len(missing)} of {len(held.states)} chunks to read"
        if evictions:
            reason += "; evicted " + ", ".join(f"{e.num_chunks} of {e.digest}" for e in evictions)
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

    def resident_bytes(self, digest: Digest) -> Bytes:
        held = self._held[digest]
        if not held.num_resident:
            return 0
        full = held.num_resident * held.chunk_bytes
        is_last_resident = held.states[-1] is ChunkState.RESIDENT
        return full - (len(held.states) * held.chunk_bytes - held.num_bytes) * is_last_resident

    def check(self) -> None:
        """Assert the invariants of the class docstring."""
        frames = list(self._free)
        for held in self._held.values():
            for state, frame in zip(held.states, held.frames, strict=True):
                assert (state is ChunkState.ABSENT) == (frame == -1)
                frames += [] if frame == -1 else [frame]
            assert held.num_resident == held.states.count(ChunkState.RESIDENT)
            assert held.pins >= 0
            assert held.pins or ChunkState.FAILED not in held.states
            assert bool(held.pins) == (held.pinned_frames is not None)
            if held.pinned_frames is not None:
                is_outside = len(held.states) > self.num_frames
                assert held.pinned_frames == (() if is_outside else tuple(held.frames))
        assert sorted(frames) == list(range(self.num_frames)), "a frame is lost or held twice"

    def _pin_outside(self, held: _Held, now: Seconds) -> Admission:
        held.count_use(now)
        held.pins += 1
        held.pinned_frames = ()
        reason = f"{len(held.states)} chunks, {self.num_frames} frames: streamed past the pool"
        return Admission((), (), (), reason)

    def _make_room(self, wanted: _Held, num_missing: int, now: Seconds) -> tuple[Eviction, ...]:
        short = num_missing - len(self._free)
        if short <= 0:
            return ()
        victims = [h for h in self._held.values() if not h.pins and h.num_resident and h is not wanted]
        if short > sum(h.num_resident for h in victims):
            raise self._out_of_memory(wanted, num_missing)
        evictions = []
        for victim in sorted(victims, key=lambda h: (h.value(now), h.digest)):
            last_first = [i for i in range(len(victim.states) - 1, -1, -1) if victim.states[i] is ChunkState.RESIDENT]
            count = self._free_chunks(victim, last_first[:short])
            evictions.append(Eviction(victim.digest, count))
            short -= count
            if not short:
                break
        return tuple(evictions)

    def _out_of_memory(self, wanted: _Held, num_missing: int) -> OutOfMemory:
        total = len(wanted.states)
        if total > self.num_frames:
            return OutOfMemory(
                f"checkpoint {wanted.digest} has {total} chunks ({wanted.num_bytes} bytes), the whole DRAM pool has "
                f"{self.num_frames} frames; give the node a larger pool, or run it on a "
                "device with memory of its own, to which it is streamed"
            )
        pinned = ", ".join(f"{h.digest} ({len(h.states)})" for h in self._held.values() if h.pins) or "nothing"
        return OutOfMemory(
            f"checkpoint {wanted.digest} needs {num_missing} more frames; of the pool's {self.num_frames}, "
            f"{len(self._free)} are free, {self.num_evictable - (0 if wanted.pins else wanted.num_resident)} can be "
            f"evicted, and pinned by running models are: {pinned}. Stop one of them or give the node a larger pool"
        )

    def _free_chunks(self, held: _Held, indices: list[int]) -> int:
        for index in indices:
            held.num_resident -= held.states[index] is ChunkState.RESIDENT
            held.states[index] = ChunkState.ABSENT
            self._free.append(held.frames[index])
            held.frames[index] = -1
        return len(indices)

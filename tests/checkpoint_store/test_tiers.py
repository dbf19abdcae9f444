"""What is in DRAM: one read per chunk, pins hold, frames are conserved, the cheapest loss goes first."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nearline.checkpoint_store import DramTier, Eviction
from nearline.protocol import Digest
from nearline.protocol.errors import OutOfMemory

CHUNK = 4096
A, B, C, D = (Digest(name * 4) for name in "abcd")


def tier(num_frames: int, **num_chunks: int) -> DramTier:
    result = DramTier(num_frames)
    for name, count in num_chunks.items():
        result.register(Digest(name * 4), count * CHUNK, CHUNK)
    return result


def load(tier: DramTier, digest: Digest, now: float = 0.0) -> tuple[int, ...]:
    admission = tier.pin(digest, now)
    for index in admission.to_read:
        tier.finish(digest, index)
    return admission.frames


def test_two_pins_of_one_checkpoint_read_each_chunk_once() -> None:
    t = tier(8, a=3)
    first, second = t.pin(A, 0.0), t.pin(A, 1.0)
    assert first.to_read == (0, 1, 2)
    assert second.to_read == ()
    assert first.frames == second.frames
    t.check()


def test_unpinned_chunks_stay_and_are_not_read_again() -> None:
    t = tier(8, a=3)
    frames = load(t, A)
    t.unpin(A)
    assert t.pin(A, 1.0).to_read == ()
    assert t.pin(A, 1.0).frames == frames


def test_what_does_not_fit_beside_pins_is_refused_with_the_numbers_and_nothing_changes() -> None:
    t = tier(8, a=3, b=2, c=4)
    load(t, A)
    load(t, B)
    t.unpin(B)
    t.register(D, 6 * CHUNK, CHUNK)
    with pytest.raises(OutOfMemory) as refused:
        t.pin(D, 0.0)
    message = refused.value.message
    assert "needs 6 more frames; of the pool's 8, 3 are free, 2 can be evicted" in message
    assert f"{A} (3)" in message
    assert t.resident_bytes(B) == 2 * CHUNK
    t.check()


def test_a_checkpoint_larger_than_the_pool_is_told_so() -> None:
    with pytest.raises(OutOfMemory, match=r"has 9 chunks \(36864 bytes\), the whole DRAM pool has 8 frames"):
        tier(8, a=9).pin(A, 0.0)


def test_a_checkpoint_larger_than_the_pool_is_held_without_frames_where_it_may_be_streamed() -> None:
    t = tier(8, a=9, b=8)
    load(t, B)
    t.unpin(B)
    for _ in range(2):
        admission = t.pin(A, 1.0, may_stream=True)
        assert (admission.frames, admission.to_read, admission.evictions) == ((), (), ())
        t.check()
    with pytest.raises(OutOfMemory, match="has 9 chunks"):
        t.pin(A, 1.0)
    assert t.is_pinned(A)
    assert t.resident_bytes(B) == 8 * CHUNK, "it takes nothing from anybody"
    assert not t.forget(A)
    assert [t.unpin(A), t.unpin(A)] == [False, True]
    assert t.forget(A)
    assert len(t.pin(B, 2.0, may_stream=True).frames) == 8, "one that fits is held in frames"
    t.check()


def test_only_as_many_chunks_go_as_are_needed_and_the_last_ones_first() -> None:
    t = tier(8, a=6, b=4)
    load(t, A)
    t.unpin(A)
    assert t.pin(B, 1.0).evictions == (Eviction(A, 2),)
    for index in range(4):
        t.finish(B, index)
    t.unpin(B)
    assert t.resident_bytes(A) == 4 * CHUNK
    assert t.pin(A, 2.0).to_read == (4, 5)


def test_the_rarely_used_goes_before_the_often_used() -> None:
    t = tier(4, a=2, b=2, c=2)
    for now in (0.0, 1.0, 2.0):
        load(t, A, now)
        t.unpin(A)
    load(t, B, 3.0)  # used later, but only once
    t.unpin(B)
    assert t.pin(C, 4.0).evictions == (Eviction(B, 2),)


def test_old_popularity_fades() -> None:
    t = tier(4, a=2, b=2, c=2)
    for now in (0.0, 1.0, 2.0):
        load(t, A, now)
        t.unpin(A)
    load(t, B, 4000.0)
    t.unpin(B)
    assert t.pin(C, 4001.0).evictions == (Eviction(A, 2),)


def test_what_is_dear_to_bring_back_stays() -> None:
    t = DramTier(4)
    t.register(A, 2 * CHUNK, CHUNK, bring_back_s_per_byte=10.0)  # from another node
    t.register(B, 2 * CHUNK, CHUNK)
    t.register(C, 2 * CHUNK, CHUNK)
    load(t, A, 0.0)
    load(t, B, 1.0)
    t.unpin(A)
    t.unpin(B)
    assert t.pin(C, 2.0).evictions == (Eviction(B, 2),)


def test_a_failed_chunk_keeps_its_frame_until_the_last_pin_ends() -> None:
    t = tier(2, a=2, b=1)
    t.pin(A, 0.0)
    t.finish(A, 0)
    t.fail(A, [1])
    assert t.has_failed(A)
    with pytest.raises(OutOfMemory):
        t.pin(B, 1.0)
    t.unpin(A)
    assert not t.has_failed(A)
    assert t.pin(B, 2.0).evictions == ()
    t.check()


def test_a_cancelled_read_gives_its_frames_back_but_not_the_one_being_filled() -> None:
    t = tier(4, a=4)
    t.pin(A, 0.0)
    assert t.unpin(A)
    t.drop(A, [1, 2, 3])
    assert (t.num_free, t.num_draining, t.num_evictable) == (3, 1, 0)
    assert not t.forget(A)
    t.finish(A, 0)
    assert (t.num_draining, t.num_evictable) == (0, 1)
    assert t.forget(A)
    assert t.num_free == 4


@pytest.mark.parametrize(("last_bytes", "expected"), [(CHUNK, 3 * CHUNK), (1, 2 * CHUNK + 1)])
def test_resident_bytes_count_the_short_last_chunk_as_it_is(last_bytes: int, expected: int) -> None:
    t = DramTier(4)
    t.register(A, 2 * CHUNK + last_bytes, CHUNK)
    load(t, A)
    assert t.resident_bytes(A) == expected


def test_evicting_frees_only_what_is_not_pinned() -> None:
    t = tier(4, a=2)
    load(t, A)
    assert t.evict(A) == 0
    t.unpin(A)
    assert t.evict(A) == 2
    assert t.num_free == 4


@dataclass
class _Model:
    pins: int = 0
    frames: tuple[int, ...] = ()
    unread: list[int] = field(default_factory=list)


class TierMachine(RuleBasedStateMachine):
    """Random pins, unpins, reads, failures, cancellations and evictions against a model that knows only promises."""

    SIZES: ClassVar = {A: 1, B: 3, C: 4, D: 7}

    def __init__(self) -> None:
        super().__init__()
        self.tier = DramTier(9)
        self.models = {digest: _Model() for digest in self.SIZES}
        for digest, count in self.SIZES.items():
            self.tier.register(digest, count * CHUNK - 1, CHUNK)
        self.now = 0.0

    @rule(digest=st.sampled_from([A, B, C, D]), passed=st.floats(0, 900))
    def pin(self, digest: Digest, passed: float) -> None:
        self.now += passed
        model, free, evictable = self.models[digest], self.tier.num_free, self.tier.num_evictable
        before = {d: self.tier.resident_bytes(d) for d in self.SIZES}
        try:
            admission = self.tier.pin(digest, self.now)
        except OutOfMemory:
            assert {d: self.tier.resident_bytes(d) for d in self.SIZES} == before
            assert self.SIZES[digest] > free + evictable - (0 if model.pins else before[digest] // CHUNK)
            return
        assert not set(admission.to_read) & set(model.unread), "a chunk is read twice"
        assert not model.pins or (admission.frames == model.frames and not admission.to_read)
        assert all(not self.models[e.digest].pins for e in admission.evictions), "a pinned chunk was evicted"
        assert sum(e.num_chunks for e in admission.evictions) <= max(0, len(admission.to_read) - free), (
            "evicts too much"
        )
        model.pins += 1
        model.frames = admission.frames
        model.unread += admission.to_read

    @precondition(lambda self: any(m.unread for m in self.models.values()))
    @rule(data=st.data(), is_good=st.booleans())
    def end_a_read(self, data: st.DataObject, is_good: bool) -> None:
        digest = data.draw(st.sampled_from([d for d, m in self.models.items() if m.unread]))
        index = data.draw(st.sampled_from(self.models[digest].unread))
        self.models[digest].unread.remove(index)
        if is_good:
            self.tier.finish(digest, index)
        else:
            self.tier.fail(digest, [index])

    @precondition(lambda self: any(m.pins for m in self.models.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from([d for d, m in self.models.items() if m.pins]))
        model = self.models[digest]
        model.pins -= 1
        assert self.tier.unpin(digest) == (model.pins == 0)
        if not model.pins:
            started = data.draw(st.integers(0, len(model.unread)))
            self.tier.drop(digest, model.unread[started:])
            del model.unread[started:]

    @rule(digest=st.sampled_from([A, B, C, D]))
    def evict(self, digest: Digest) -> None:
        freed = self.tier.evict(digest)
        assert not (freed and self.models[digest].pins)

    @rule(digest=st.sampled_from([A, B, C, D]))
    def forget_and_meet_again(self, digest: Digest) -> None:
        model = self.models[digest]
        assert self.tier.forget(digest) == (not model.pins and not model.unread)
        self.tier.register(digest, self.SIZES[digest] * CHUNK - 1, CHUNK)

    @invariant()
    def holds_its_invariants(self) -> None:
        self.tier.check()
        for digest, model in self.models.items():
            assert self.tier.pending(digest) == sorted(model.unread)
            assert self.tier.is_pinned(digest) == (model.pins > 0)
        pinned = [f for m in self.models.values() if m.pins for f in m.frames]
        assert len(pinned) == len(set(pinned)), "two pinned chunks share a frame"


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""Small checkpoints share frames: no two overlap, nothing pinned goes, and what goes is the cheapest that is enough."""

import itertools
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nearline.checkpoint_store import DramTier, Eviction
from nearline.checkpoint_store.packing import Packs
from nearline.protocol import Digest, Extent
from nearline.protocol.errors import OutOfMemory

PAGE = 4096
FRAME = 8 * PAGE


def tier(num_frames: int, **num_bytes: int) -> DramTier:
    """Adapters by their bytes."""
    result = DramTier(num_frames, FRAME)
    for name, count in num_bytes.items():
        result.register(Digest(name), count, FRAME, may_pack=True)
    return result


def load(tier: DramTier, name: str, now: float = 0.0) -> Extent:
    admission = tier.pin(Digest(name), now)
    for index in admission.to_read:
        tier.finish(Digest(name), index)
    assert admission.frames == ()
    assert admission.extent is not None
    return admission.extent


def let_in(tier: DramTier, *names: str) -> list[Extent]:
    extents = []
    for now, name in enumerate(names):
        extents.append(load(tier, name, float(now)))
        tier.unpin(Digest(name))
    return extents


def test_many_small_ones_take_one_frame_on_page_boundaries() -> None:
    t = tier(4, a=1, b=PAGE, c=PAGE + 1)
    assert let_in(t, "a", "b", "c") == [Extent(0, 1), Extent(PAGE, PAGE), Extent(2 * PAGE, PAGE + 1)]
    assert t.num_free == 3
    assert t.resident_bytes(Digest("c")) == PAGE + 1
    t.check()


def test_the_hole_that_fits_best_is_taken() -> None:
    t = tier(2, a=5 * PAGE, b=2 * PAGE, c=PAGE, d=7 * PAGE, e=2 * PAGE, f=PAGE)
    let_in(t, "a", "b", "c", "d")
    t.evict(Digest("b"))
    assert load(t, "f") == Extent(FRAME + 7 * PAGE, PAGE)
    assert load(t, "e") == Extent(5 * PAGE, 2 * PAGE)
    t.check()


def test_an_emptied_pack_is_a_free_frame_again() -> None:
    t = tier(2, a=PAGE, b=PAGE)
    let_in(t, "a", "b")
    t.evict(Digest("a"))
    assert t.num_free == 1
    t.evict(Digest("b"))
    assert t.num_free == 2
    t.check()


def test_what_is_larger_than_a_chunk_or_mapped_by_engines_keeps_its_frames() -> None:
    t = DramTier(4, FRAME)
    t.register(Digest("large"), FRAME + 1, FRAME, may_pack=True)
    t.register(Digest("model"), PAGE, FRAME)
    assert [len(t.pin(Digest(name), 0.0).frames) for name in ("large", "model")] == [2, 1]
    t.check()


def test_two_pins_of_a_packed_checkpoint_read_it_once_and_a_cancelled_read_gives_its_place_back() -> None:
    t = tier(1, a=FRAME)
    first, second = t.pin(Digest("a"), 0.0), t.pin(Digest("a"), 0.0)
    assert (first.to_read, second.to_read) == ((0,), ())
    assert first.extent == second.extent
    assert [t.unpin(Digest("a")), t.unpin(Digest("a"))] == [False, True]
    t.drop(Digest("a"), [0])
    assert t.num_free == 1
    t.check()


def test_a_place_is_kept_while_it_is_being_filled_even_if_nobody_wants_it() -> None:
    t = tier(1, a=FRAME, b=PAGE)
    t.pin(Digest("a"), 0.0)
    t.unpin(Digest("a"))
    assert t.num_draining == 1
    with pytest.raises(OutOfMemory):
        t.pin(Digest("b"), 1.0)
    t.finish(Digest("a"), 0)
    assert t.pin(Digest("b"), 2.0).evictions == (Eviction(Digest("a"), 1),)
    t.check()


def test_a_model_takes_packs_whose_contents_nobody_holds_and_no_others() -> None:
    t = tier(3, a=FRAME, b=4 * PAGE, c=4 * PAGE, d=FRAME)
    let_in(t, "a", "b", "c", "d")
    t.pin(Digest("c"), 4.0)
    t.register(Digest("model"), 2 * FRAME, FRAME)
    assert {e.digest for e in t.pin(Digest("model"), 5.0).evictions} == {"a", "d"}
    t.register(Digest("other"), FRAME, FRAME)
    with pytest.raises(OutOfMemory, match=r"0 are free, 0 can be evicted, .* c \(1\), model \(2\)"):
        t.pin(Digest("other"), 6.0)
    assert t.resident_bytes(Digest("b")) == 4 * PAGE
    t.check()


def test_a_pack_is_worth_what_it_holds_beside_whole_checkpoints() -> None:
    t = tier(2, a=PAGE, b=PAGE)
    let_in(t, "a", "b")
    t.register(Digest("model"), FRAME, FRAME)
    t.pin(Digest("model"), 2.0)
    t.finish(Digest("model"), 0)
    t.unpin(Digest("model"))
    t.register(Digest("other"), FRAME, FRAME)
    evicted = t.pin(Digest("other"), 3.0).evictions
    assert [e.digest for e in evicted] == ["a", "b"], "a quarter of a frame is worth less than a whole one"
    t.check()


def test_what_is_used_less_per_byte_makes_room_whether_packed_or_not() -> None:
    t = tier(2, a=4 * PAGE, b=4 * PAGE, c=3 * PAGE, d=FRAME)
    for _ in range(3):
        let_in(t, "a", "b")
    t.register(Digest("model"), FRAME, FRAME)
    t.pin(Digest("model"), 3.0)
    t.finish(Digest("model"), 0)
    t.unpin(Digest("model"))
    assert t.pin(Digest("d"), 4.0).evictions == (Eviction(Digest("model"), 1),)
    t.finish(Digest("d"), 0)
    assert t.pin(Digest("c"), 5.0).evictions == (Eviction(Digest("a"), 1),)
    t.check()


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=10),
    losses=st.lists(st.none() | st.integers(0, 5), min_size=10, max_size=10),
    gone=st.lists(st.booleans(), min_size=10, max_size=10),
    wanted=st.integers(1, 8),
)
def test_the_cheapest_window_is_the_cheapest_by_brute_force(
    sizes: list[int], losses: list[int | None], gone: list[bool], wanted: int
) -> None:
    packs = Packs(FRAME)
    opened = 0
    for index, size in enumerate(sizes):
        if not packs.place(Digest(f"{index}"), size * PAGE):
            packs.open(opened, Digest(f"{index}"), size * PAGE)
            opened += 1
    for index in range(len(sizes)):
        if gone[index]:
            packs.remove(Digest(f"{index}"))
    packs.check()
    best: float | None = None
    for frame in packs.frames:
        movable = [d for d in packs.contents(frame) if losses[int(d)] is not None]
        for count in range(1, len(movable) + 1):
            for chosen in itertools.combinations(movable, count):
                if _largest_hole(packs, frame, chosen) >= wanted * PAGE:
                    loss = sum(losses[int(d)] or 0 for d in chosen)
                    best = loss if best is None else min(best, loss)
    found = packs.cheapest_window(wanted * PAGE, lambda digest: losses[int(digest)])
    already = any(_largest_hole(packs, frame, ()) >= wanted * PAGE for frame in packs.frames)
    if not already:
        assert (found.loss if found else None) == best
        if found:
            emptied = [frame for digest in found.digests if (frame := packs.remove(digest)) is not None]
            assert emptied or packs.place(Digest("new"), wanted * PAGE)
            packs.check()


def _largest_hole(packs: Packs, frame: int, without: tuple[Digest, ...]) -> int:
    used = [False] * (FRAME // PAGE)
    for digest in packs.contents(frame):
        extent = packs.extent(digest)
        start = (extent.offset - frame * FRAME) // PAGE
        for page in range(start, start + -(-extent.num_bytes // PAGE)):
            used[page] = used[page] or digest not in without
    runs = [len(list(run)) for is_used, run in itertools.groupby(used) if not is_used]
    return max(runs, default=0) * PAGE


class PackMachine(RuleBasedStateMachine):
    """Adapters and models come and go in one pool; a model of it knows only who holds which bytes."""

    PACKED: ClassVar = {Digest(f"p{i}"): (i * 7 % 11 + 1) * PAGE * 2 // 3 for i in range(9)}
    MODELS: ClassVar = {Digest("m1"): 1, Digest("m2"): 2, Digest("m3"): 3}

    def __init__(self) -> None:
        super().__init__()
        self.tier = DramTier(4, FRAME)
        self.now = 0.0
        self.pins = dict.fromkeys([*self.PACKED, *self.MODELS], 0)
        self.held: dict[Digest, tuple[Extent, ...]] = {}
        self.unread: list[tuple[Digest, int]] = []
        for digest, num_bytes in self.PACKED.items():
            self.tier.register(digest, num_bytes, FRAME, may_pack=True)
        for digest, count in self.MODELS.items():
            self.tier.register(digest, count * FRAME - 1, FRAME)

    @rule(digest=st.sampled_from([*PACKED, *MODELS]), passed=st.floats(0, 900))
    def pin(self, digest: Digest, passed: float) -> None:
        self.now += passed
        before = {d: self.tier.resident_bytes(d) for d in self.pins}
        try:
            admission = self.tier.pin(digest, self.now)
        except OutOfMemory:
            assert {d: self.tier.resident_bytes(d) for d in self.pins} == before
            return
        assert not any(self.pins[e.digest] for e in admission.evictions), "a pinned checkpoint was evicted"
        extents = tuple(Extent(frame * FRAME, FRAME) for frame in admission.frames)
        if digest in self.PACKED:
            assert admission.extent is not None
            assert admission.extent.num_bytes == self.PACKED[digest]
            extents = (admission.extent,)
        assert self.pins[digest] == 0 or self.held[digest] == extents, "a held checkpoint moved"
        assert not any((digest, index) in self.unread for index in admission.to_read), "read twice"
        self.held[digest] = extents
        self.pins[digest] += 1
        self.unread += [(digest, index) for index in admission.to_read]

    @precondition(lambda self: self.unread)
    @rule(data=st.data(), is_good=st.booleans())
    def end_a_read(self, data: st.DataObject, is_good: bool) -> None:
        one = data.draw(st.sampled_from(self.unread))
        self.unread.remove(one)
        if is_good:
            self.tier.finish(*one)
        else:
            self.tier.fail(one[0], [one[1]])

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data(), is_cancelled=st.booleans())
    def unpin(self, data: st.DataObject, is_cancelled: bool) -> None:
        digest = data.draw(st.sampled_from([d for d, pins in self.pins.items() if pins]))
        self.pins[digest] -= 1
        assert self.tier.unpin(digest) == (self.pins[digest] == 0)
        if not self.pins[digest] and is_cancelled:
            dropped = [index for d, index in self.unread if d == digest]
            self.tier.drop(digest, dropped)
            self.unread = [one for one in self.unread if one[0] != digest]

    @rule(digest=st.sampled_from([*PACKED, *MODELS]))
    def evict(self, digest: Digest) -> None:
        freed = self.tier.evict(digest)
        assert not (freed and self.pins[digest])

    @rule(digest=st.sampled_from([*PACKED]))
    def forget_and_meet_again(self, digest: Digest) -> None:
        is_used = self.pins[digest] or any(d == digest for d, _ in self.unread)
        assert self.tier.forget(digest) == (not is_used)
        self.tier.register(digest, self.PACKED[digest], FRAME, may_pack=True)

    @invariant()
    def holds_its_invariants(self) -> None:
        self.tier.check()
        extents = [extent for digest, pins in self.pins.items() if pins for extent in self.held[digest]]
        extents += [self.held[digest][index] for digest, index in self.unread if not self.pins[digest]]
        spans = sorted((e.offset, e.offset + e.num_bytes) for e in extents)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "two held extents overlap"


TestPackMachine = PackMachine.TestCase
TestPackMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)

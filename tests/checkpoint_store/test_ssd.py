"""Who leaves SSD for an import, and what is said when nobody can."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearline.checkpoint_store.ssd import Room, StoredCheckpoint, choose_evictions, free_bytes
from nearline.protocol import Digest
from nearline.protocol.errors import StorageFull

GB = 10**9


def stored(
    name: str, num_bytes: int = GB, value: float = 0.0, fetchable: bool = True, used: bool = False
) -> StoredCheckpoint:
    return StoredCheckpoint(Digest(name), num_bytes, f"hub:org/{name}", fetchable, used, value)


def test_nothing_goes_while_there_is_room() -> None:
    assert choose_evictions([stored("a")], GB, GB, 5 * GB) == ()


def test_the_least_used_goes_first_and_no_more_than_needed() -> None:
    held = [stored("a", value=3.0), stored("b", value=1.0), stored("c", value=2.0)]
    assert choose_evictions(held, GB, 0, 3 * GB) == ("b",)
    assert choose_evictions(held, 2 * GB, GB // 2, 3 * GB) == ("b", "c")
    mixed = [stored("small", GB // 10, value=0.1), stored("large", 3 * GB, value=0.2)]
    assert choose_evictions(mixed, 2 * GB, 0, 4 * GB) == ("large",)


def test_what_is_in_use_or_cannot_be_fetched_stays_and_is_named_when_there_is_no_room() -> None:
    held = [stored("used", 2 * GB, used=True), stored("local", 3 * GB, fetchable=False), stored("gone", GB)]
    assert choose_evictions(held, GB, 0, 6 * GB) == ("gone",)
    with pytest.raises(StorageFull) as caught:
        choose_evictions(held, 5 * GB, GB, 7 * GB)
    for words in (
        "needs 5000000000 bytes", "of the store's 7000000000, 1000000000 are free and 1000000000 can be fetched again",
        "3000000000 bytes more would have to go", "hub:org/local (3000000000 bytes)",
        "hub:org/used (2000000000 bytes, in use)", "--ssd-budget",
    ):  # fmt: skip
        assert words in caught.value.message
    with pytest.raises(StorageFull, match="nothing, the budget is too small"):
        choose_evictions([], GB, 0, GB // 2)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans(), st.booleans()), max_size=7),
    st.integers(1, 30), st.integers(0, 10),
)  # fmt: skip
def test_room_is_made_whenever_any_choice_makes_it_and_no_eviction_is_needless(
    rows: list[tuple[int, int, bool, bool]], needed: int, free: int
) -> None:
    held = [stored(f"c{i}", size, value, fetchable, used) for i, (size, value, fetchable, used) in enumerate(rows)]
    sizes = {one.digest: one.num_bytes for one in held}
    may_go = [one.digest for one in held if one.is_fetchable and not one.is_in_use]
    try:
        chosen = choose_evictions(held, needed, free, 100)
    except StorageFull:
        assert free + sum(sizes[d] for d in may_go) < needed
        return
    assert set(chosen) <= set(may_go)
    assert free + sum(sizes[d] for d in chosen) >= needed
    for kept in itertools.combinations(chosen, max(len(chosen) - 1, 0)):
        assert not chosen or free + sum(sizes[d] for d in kept) < needed


def test_what_imports_were_promised_is_not_free_and_what_they_wrote_is_not_counted_twice() -> None:
    rooms = [Room(50, written_bytes=20), Room(10, written_bytes=11)]
    assert free_bytes(100, None, rooms) == 70, "the disk has lost the written bytes already"
    assert free_bytes(100, 100, rooms) == 40, "the budget counts them when they are committed"
    assert free_bytes(20, None, rooms) == 0

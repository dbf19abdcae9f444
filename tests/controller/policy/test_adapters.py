"""Homes of adapters: everybody has one, traffic is shared fairly, and little moves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearline.controller.policy.adapters import (
    HALF_LIFE_S,
    AdapterTraffic,
    Home,
    burst_tolerance,
    homes,
    to_prepare,
)
from nearline.protocol import Digest, InstanceId

NAMES = [Digest(f"a{i}") for i in range(12)]


def instances(count: int, num_adapters: int = 8, present: dict[int, list[str]] | None = None) -> list[Home]:
    return [
        Home(InstanceId(f"i{n}"), num_adapters, {Digest(name): None for name in (present or {}).get(n, [])})
        for n in range(count)
    ]


def shown(traffic: dict[str, float], places: list[Home]) -> dict[str, list[str]]:
    chosen = homes({Digest(name): value for name, value in traffic.items()}, places)
    return {str(instance): sorted(map(str, digests)) for instance, digests in chosen.items()}


def test_equal_adapters_are_spread_evenly() -> None:
    chosen = shown(dict.fromkeys("abcd", 1.0), instances(2, num_adapters=2))
    assert sorted(len(digests) for digests in chosen.values()) == [2, 2]


def test_one_that_gets_most_of_the_traffic_has_more_homes_than_the_others() -> None:
    chosen = shown({"hot": 90.0, "b": 5.0, "c": 5.0}, instances(3))
    assert sum("hot" in digests for digests in chosen.values()) == 3
    assert sum("b" in digests for digests in chosen.values()) == 1


def test_adapters_stay_where_they_are_while_that_is_fair() -> None:
    present = {0: ["d", "c"], 1: ["a", "b"]}
    assert shown(dict.fromkeys("abcd", 1.0), instances(2, 2, present)) == {"i0": ["c", "d"], "i1": ["a", "b"]}


def test_what_is_crowded_in_one_place_spreads_out() -> None:
    chosen = shown(dict.fromkeys("abcd", 1.0), instances(2, 2, {0: ["a", "b", "c", "d"]}))
    assert [len(digests) for digests in chosen.values()] == [2, 2]


@given(
    st.dictionaries(st.sampled_from(NAMES), st.floats(0.01, 100), min_size=1), st.integers(1, 5), st.integers(1, 6),
    st.lists(st.lists(st.sampled_from(NAMES), max_size=6), min_size=5, max_size=5),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_everybody_has_a_home_places_are_kept_and_burst_tolerance_never_falls(
    traffic: dict[Digest, float], count: int, num_adapters: int, present: list[list[Digest]]
) -> None:
    places = instances(count, num_adapters, dict(enumerate([list(map(str, one)) for one in present])))
    chosen = homes(traffic, places)
    where = {adapter: [i for i, digests in chosen.items() if adapter in digests] for adapter in traffic}
    assert all(where.values())
    if len(traffic) <= count * num_adapters:
        assert all(len(digests) <= num_adapters for digests in chosen.values())
    assert homes(traffic, places) == chosen, "deterministic"
    room = {one.instance_id: max(0.0, 1 - len(chosen[one.instance_id]) / num_adapters) for one in places}
    assert burst_tolerance(traffic, where, room) >= 0.0


def test_traffic_fades_and_what_nobody_asks_for_is_forgotten() -> None:
    traffic = AdapterTraffic()
    for _ in range(4):
        traffic.note(Digest("a"), 0.0)
    traffic.note(Digest("b"), HALF_LIFE_S)
    assert traffic.expected(HALF_LIFE_S) == {"a": 2.0, "b": 1.0}
    assert traffic.expected(40 * HALF_LIFE_S) == {}


def test_nothing_is_expected_of_an_adapter_that_is_gone() -> None:
    traffic = AdapterTraffic()
    traffic.note(Digest("a"), 0.0)
    traffic.note(Digest("b"), 0.0)
    traffic.forget(Digest("a"))
    traffic.forget(Digest("never-there"))
    assert traffic.expected(0.0) == {"b": 1.0}


TRAFFIC = {"a": 5.0, "b": 9.0, "c": 2.0, "d": 1.9, "e": 5.0}


@pytest.mark.parametrize(
    ("at_home", "known", "num_adapters", "expected"),
    [
        ("abcde", "", 9, "baec"),  # by traffic, then by name; d is asked for too rarely
        ("acd", "", 9, "ac"),  # only what is at home
        ("abcde", "a", 9, "bec"),  # not what is there, or was asked for
        ("abcde", "b", 2, "a"),  # as many as it can keep, those it has included
        ("abcde", "ba", 2, ""),
        ("", "", 9, ""),
    ],
)
def test_the_hottest_at_home_are_prepared_in_order(at_home: str, known: str, num_adapters: int, expected: str) -> None:
    traffic = {Digest(name): value for name, value in TRAFFIC.items()}
    chosen = to_prepare(traffic, [*at_home], [*known], num_adapters, least=2.0)
    assert "".join(chosen) == expected

"""Which adapters are read, kept and freed, action by action."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearline.engine import AdapterTable, FreeAdapter, ReadAdapter, Sequence
from nearline.engine.adapters import READ_COST_BYTES, USE_HALF_LIFE_S
from nearline.protocol.errors import ErrorInfo, NearlineError
from tests.engine.fake_engine import Engine, make_request


def sequence(name: str, adapter: str, serial: int) -> Sequence:
    one = make_request(name, [1], adapter_digest=adapter)
    return Sequence(one, 1, [1], arrived_at=float(serial), serial=serial)


def ready(table: AdapterTable, *digests: str, now: float = 0.0, num_bytes: int = 10) -> None:
    for digest in digests:
        table.announce(digest, f"/{digest}")  # type: ignore[arg-type]
        assert ReadAdapter(digest, f"/{digest}") in table.plan()  # type: ignore[arg-type]
        table.loaded(digest, num_bytes, now)  # type: ignore[arg-type]


def test_an_adapter_is_read_once_and_announced_again_for_nothing() -> None:
    table = AdapterTable(4, 1000)
    assert table.announce("a", "/a") is False
    assert table.plan() == [ReadAdapter("a", "/a")]
    assert table.announce("a", "/a") is False
    assert table.plan() == []
    table.loaded("a", 10, 1.0)
    assert table.announce("a", "/a") is True
    assert table.plan() == []


def test_a_pinned_adapter_is_unloaded_only_when_its_last_sequence_has_ended() -> None:
    table = AdapterTable(4, 1000)
    ready(table, "a")
    running, waiting = sequence("running", "a", 1), sequence("waiting", "a", 2)
    table.join(running)
    table.pin(running)
    table.join(waiting)
    table.retire("a")
    assert table.problem("a") is not None
    for one in (running, waiting):
        assert table.plan() == []
        assert table.can_start(one)
        table.leave(one, 2.0)
    assert table.plan() == [FreeAdapter("a")]
    assert isinstance(table.problem("a"), NearlineError)
    table.check()


def test_unloading_while_reading_waits_for_the_read() -> None:
    table = AdapterTable(4, 1000)
    table.announce("a", "/a")
    table.plan()
    table.retire("a")
    assert table.plan() == []
    table.loaded("a", 10, 1.0)
    assert table.plan() == [FreeAdapter("a")]


def test_an_unload_followed_by_a_load_keeps_the_adapter() -> None:
    table = AdapterTable(4, 1000)
    ready(table, "a")
    table.retire("a")
    assert table.announce("a", "/a") is True
    assert table.plan() == []
    assert table.problem("a") is None


def used(table: AdapterTable, digest: str, *times: float) -> None:
    """Sequences of one adapter, one after another, each ending at its time."""
    for serial, now in enumerate(times, 1000):
        one = sequence(f"{digest}{now}", digest, serial)
        assert table.join(one), "it is ready"
        table.pin(one)
        table.leave(one, now)


def test_of_adapters_of_one_size_used_equally_often_the_least_recently_used_makes_place() -> None:
    table = AdapterTable(2, 1000)
    ready(table, "a", now=1.0)
    ready(table, "b", now=2.0)
    used(table, "a", 4.0)
    used(table, "b", 3.0)
    table.announce("c", "/c")
    assert table.plan() == [FreeAdapter("b"), ReadAdapter("c", "/c")]
    table.check()


def test_an_adapter_used_often_outlives_one_used_once_and_later() -> None:
    table = AdapterTable(2, 1000)
    ready(table, "often", "once")
    used(table, "often", 1.0, 2.0, 3.0)
    used(table, "once", 4.0)
    table.announce("c", "/c")
    assert table.plan() == [FreeAdapter("once"), ReadAdapter("c", "/c")]


def test_what_was_used_often_long_ago_goes_before_what_is_used_now() -> None:
    """Control of the test above: eight uses, four half-lives ago, weigh half of one."""
    table = AdapterTable(2, 1000)
    ready(table, "often", "once")
    used(table, "often", *[1.0] * 8)
    used(table, "once", 1.0 + 4 * USE_HALF_LIFE_S)
    table.announce("c", "/c")
    assert table.plan() == [FreeAdapter("often"), ReadAdapter("c", "/c")]


def test_for_a_place_the_smaller_of_two_goes_and_for_bytes_the_larger() -> None:
    """A place is a place, so the one that is read back sooner goes; a small one gives few bytes for its reading."""
    mib = 1 << 20
    for max_adapters, max_bytes, gone in ((2, 1000 * mib, "small"), (8, 100 * mib, "large")):
        table = AdapterTable(max_adapters, max_bytes)
        ready(table, "large", num_bytes=90 * mib)
        ready(table, "small", num_bytes=9 * mib)
        table.announce("new", "/new")
        actions = table.plan()
        if not isinstance(actions[0], FreeAdapter):  # its size is known only when it has been read
            table.loaded("new", 9 * mib, 0.0)
            actions = table.plan()
        assert actions[0] == FreeAdapter(gone)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.lists(st.integers(0, 5000), max_size=6)), min_size=2, max_size=6))
def test_who_goes_is_the_least_of_decayed_uses_times_bytes(adapters: list[tuple[int, list[int]]]) -> None:
    """By brute force: the read counts as one use at time 0, each later one as 2^(-age / half-life)."""
    table, last = AdapterTable(len(adapters), 1 << 40), 5000.0
    costs = {}
    for i, (num_mib, times) in enumerate(adapters):
        ready(table, f"{i}", num_bytes=num_mib << 20)
        used(table, f"{i}", *map(float, sorted(times)))
        uses = sum(2.0 ** (-(last - time) / USE_HALF_LIFE_S) for time in [0, *times])
        costs[f"{i}"] = uses * ((num_mib << 20) + READ_COST_BYTES)
    table.announce("new", "/new")
    freed, _ = table.plan()
    assert costs[freed.digest] <= min(costs.values()) * (1 + 1e-9)


def reads_of(trace: list[str], num_places: int) -> tuple[int, int]:
    """How often a trace of uses, one a second, reads an adapter: in our table, and were the least recent to go."""
    table, ours, theirs = AdapterTable(num_places, 1 << 40), 0, 0
    recent: dict[str, None] = {}
    for now, digest in enumerate(trace):
        table.announce(digest, f"/{digest}")  # type: ignore[arg-type]
        if any(isinstance(action, ReadAdapter) for action in table.plan()):
            table.loaded(digest, 10 << 20, float(now))  # type: ignore[arg-type]
            ours += 1
        used(table, digest, float(now))
        theirs += digest not in recent
        recent.pop(digest, None)
        recent[digest] = None
        if len(recent) > num_places:
            del recent[next(iter(recent))]
    return ours, theirs


def test_popular_adapters_stay_where_the_least_recently_used_would_be_read_again_and_again() -> None:
    """100 adapters by Zipf's law on 10 places; then all others are popular, and what was counted does no harm."""
    dice = random.Random(5)
    weights = [1 / (i + 1) for i in range(100)]
    before, after = ([f"{kind}{i}" for i in dice.choices(range(100), weights, k=800)] for kind in "ab")
    ours, theirs = reads_of(before, 10)
    assert ours < 0.85 * theirs
    both, of_both = reads_of(before + after, 10)
    assert both - ours < 1.05 * (of_both - theirs)


def test_a_squeeze_gives_up_the_cheapest_per_byte() -> None:
    table = AdapterTable(4, 1 << 40)
    ready(table, "small", num_bytes=1 << 20)
    ready(table, "large", num_bytes=60 << 20)
    assert table.plan() == []
    assert table.squeeze()
    assert table.plan() == [FreeAdapter("large")]


def test_an_evicted_adapter_is_still_known_and_comes_back_for_a_sequence() -> None:
    table = AdapterTable(1, 1000)
    ready(table, "a", "b")
    assert table.problem("a") is None
    one = sequence("r", "a", 1)
    assert table.join(one) is False
    assert not table.can_start(one)
    assert table.plan() == [FreeAdapter("b"), ReadAdapter("a", "/a")]


def test_bytes_limit_adapters_too_but_one_is_always_allowed() -> None:
    table = AdapterTable(8, 25)
    ready(table, "a", now=1.0)
    ready(table, "b", now=2.0)
    table.announce("large", "/large")
    assert table.plan() == [ReadAdapter("large", "/large")]  # its size is not known yet
    table.loaded("large", 100, 3.0)
    assert table.plan() == [FreeAdapter("a"), FreeAdapter("b")]
    table.join(sequence("r", "a", 1))
    assert table.plan() == [FreeAdapter("large"), ReadAdapter("a", "/a")]
    table.join(sequence("s", "large", 2))
    assert table.plan() == [], "now its size is known: it must wait until the other is done"


def test_an_announcement_displaces_nobody_whom_a_sequence_waits_for() -> None:
    table = AdapterTable(1, 1000)
    ready(table, "a")
    table.join(sequence("r", "a", 1))
    table.announce("b", "/b")
    assert table.plan() == []


def test_an_older_sequence_takes_the_place_of_an_unpinned_adapter_and_a_newer_one_does_not() -> None:
    table = AdapterTable(1, 1000)
    ready(table, "b", "a")
    table.join(sequence("newer", "a", 5))
    table.join(sequence("older", "b", 4))
    assert table.plan() == [FreeAdapter("a"), ReadAdapter("b", "/b")]
    table.loaded("b", 10, 1.0)
    assert table.plan() == [], "the newer one must not take the place back"


def test_a_pinned_adapter_yields_to_an_older_sequence_by_starting_nothing_newer() -> None:
    table = AdapterTable(1, 1000)
    ready(table, "b", "a")
    running, wanting = sequence("running", "a", 1), sequence("wanting", "b", 2)
    newer = sequence("newer", "a", 3)
    table.join(running)
    table.pin(running)
    table.join(wanting)
    table.join(newer)
    assert table.plan() == []
    assert not table.can_start(newer)
    table.leave(running, 2.0)
    assert table.plan() == [FreeAdapter("a"), ReadAdapter("b", "/b")]


def test_a_failed_adapter_says_why_and_can_be_tried_again() -> None:
    table = AdapterTable(1, 1000)
    table.announce("a", "/gone")
    table.plan()
    table.failed("a", ErrorInfo("checkpoint_corrupt", "no such file"))
    problem = table.problem("a")
    assert problem is not None
    assert (problem.code, problem.message) == ("checkpoint_corrupt", "no such file")
    assert table.plan() == []
    table.announce("a", "/a")
    assert table.problem("a") is None
    assert table.plan() == [ReadAdapter("a", "/a")]


@pytest.mark.parametrize("max_adapters", [1, 2])
def test_four_adapters_in_turn_all_answer_within_few_places(max_adapters: int) -> None:
    """Sequences of four adapters come all the time; no adapter starves, and reads stay near the least possible."""
    engine: Any = Engine(num_blocks=64, max_adapters=max_adapters, max_step_tokens=64)
    for digest in "wxyz":
        engine.core.load_adapter(digest, f"/{digest}")
    num_reads = 0
    for turn in range(400):
        if turn < 200 and turn % 3 == 0:
            engine.add(make_request(f"r{turn}", [1 + turn % 7], max_tokens=6, adapter_digest="wxyz"[turn % 4]))
        for action in engine.core.adapter_actions():
            if isinstance(action, ReadAdapter):
                num_reads += 1
                engine.core.adapter_loaded(action.digest, 10, engine.tick())
        engine.step()
    assert len(engine.ends) == 67
    assert engine.core.load.num_waiting == 0
    assert num_reads <= 67 + 4

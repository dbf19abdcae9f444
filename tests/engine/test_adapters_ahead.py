"""Adapters read ahead of their first sequence: they take nothing from anybody."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nearline.engine import AdapterTable, FreeAdapter, ReadAdapter
from nearline.protocol.errors import ErrorInfo
from tests.engine.fake_engine import Engine, make_request
from tests.engine.test_adapters import ready, sequence


def ahead(table: AdapterTable, *digests: str, num_bytes: int = 10) -> list[str]:
    """Read adapters ahead; return those for which there was a place."""
    for digest in digests:
        table.announce(digest, f"/{digest}", is_ahead=True)  # type: ignore[arg-type]
    read: list[str] = []
    while actions := table.plan():
        (action,) = actions
        assert isinstance(action, ReadAdapter), "what is read ahead evicts nobody"
        table.loaded(action.digest, num_bytes, float(len(read)))
        read.append(action.digest)
    return read


def test_adapters_are_read_ahead_one_at_a_time_in_order_and_only_into_free_places() -> None:
    table = AdapterTable(3, 1000)
    ready(table, "used")
    for digest in "abc":
        table.announce(digest, f"/{digest}", is_ahead=True)  # type: ignore[arg-type]
    assert table.plan() == [ReadAdapter("a", "/a")]
    assert table.plan() == [], "the next one only when this one is there"
    table.loaded("a", 10, 1.0)
    assert table.plan() == [ReadAdapter("b", "/b")]
    table.loaded("b", 10, 2.0)
    assert table.plan() == [], "no place is free"
    table.retire("used")
    assert table.plan() == [FreeAdapter("used")], "and a wish without a place is not kept"
    assert table.join(sequence("r", "a", 1)), "what was read ahead is there for its first sequence"
    table.check()


def test_one_that_had_to_make_place_is_not_read_ahead_again_into_a_full_engine() -> None:
    table = AdapterTable(2, 1000)
    ready(table, "cold", now=0.0)
    ready(table, "hot", now=1200.0)
    table.announce("new", "/new")
    joined = sequence("r", "new", 9)
    table.join(joined)
    assert table.plan() == [FreeAdapter("cold"), ReadAdapter("new", "/new")]
    table.loaded("new", 10, 1201.0)
    table.leave(joined, 1202.0)
    for _ in range(3):
        table.announce("cold", "/cold", is_ahead=True)
        assert table.plan() == [], "though nobody needs the others now"
    table.retire("new")
    assert table.plan() == [FreeAdapter("new")]
    table.announce("cold", "/cold", is_ahead=True)
    assert table.plan() == [ReadAdapter("cold", "/cold")], "asked again when a place is free"


def test_what_a_sequence_waits_for_is_read_before_what_nobody_asked_for() -> None:
    table = AdapterTable(4, 1000)
    table.announce("ahead", "/ahead", is_ahead=True)
    table.announce("later", "/later", is_ahead=True)
    table.announce("asked", "/asked")
    table.join(sequence("r", "asked", 1))
    assert table.plan() == [ReadAdapter("asked", "/asked")]
    table.announce("later", "/later")
    table.join(sequence("s", "later", 2))
    assert table.plan() == [ReadAdapter("later", "/later")], "asked for meanwhile: at once, beside the other"
    table.loaded("asked", 10, 1.0)
    table.loaded("later", 10, 1.0)
    assert table.plan() == [ReadAdapter("ahead", "/ahead")]


def test_what_was_read_ahead_and_never_used_goes_first_the_last_one_of_several() -> None:
    table = AdapterTable(3, 1000)
    ready(table, "used", now=0.0)
    assert ahead(table, "hot", "warm") == ["hot", "warm"]
    for serial, (new, gone) in enumerate([("x", "warm"), ("y", "hot"), ("z", "used")]):
        table.announce(new, f"/{new}")  # type: ignore[arg-type]
        table.join(sequence(f"r{serial}", new, serial))
        assert table.plan() == [FreeAdapter(gone), ReadAdapter(new, f"/{new}")]  # type: ignore[arg-type]
        table.loaded(new, 10, 9.0)  # type: ignore[arg-type]


def test_bytes_for_one_that_nobody_asked_for_are_taken_from_nobody() -> None:
    table = AdapterTable(8, 30)
    ready(table, "used", num_bytes=20)
    assert ahead(table, "as-large") == [], "its size is not known: it is taken for as large as the largest"
    table = AdapterTable(8, 45)
    ready(table, "used", num_bytes=20)
    table.announce("larger", "/larger", is_ahead=True)
    assert table.plan() == [ReadAdapter("larger", "/larger")]
    table.loaded("larger", 30, 1.0)
    assert table.plan() == [FreeAdapter("larger")], "it leaves, not what is used"
    assert ahead(table, "larger") == [], "now its size is known"


def test_nobody_pauses_while_a_place_is_about_to_come_from_a_read_that_nobody_asked_for() -> None:
    table = AdapterTable(2, 1000)
    ready(table, "busy")
    running, newer = sequence("running", "busy", 1), sequence("newer", "busy", 3)
    table.join(running)
    table.pin(running)
    table.announce("ahead", "/ahead", is_ahead=True)
    assert table.plan() == [ReadAdapter("ahead", "/ahead")]
    table.announce("wanted", "/wanted")
    table.join(sequence("wanting", "wanted", 2))
    table.join(newer)
    assert table.plan() == []
    assert table.can_start(newer)
    table.loaded("ahead", 10, 1.0)
    assert table.plan() == [FreeAdapter("ahead"), ReadAdapter("wanted", "/wanted")]


def test_one_whose_reading_ahead_failed_is_read_again_when_it_is_asked_for() -> None:
    table = AdapterTable(2, 1000)
    table.announce("a", "/a", is_ahead=True)
    table.plan()
    table.failed("a", ErrorInfo("checkpoint_corrupt", "cut short"))
    assert table.plan() == []
    table.announce("a", "/a")
    assert table.problem("a") is None
    assert table.plan() == [ReadAdapter("a", "/a")]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4), st.sampled_from([25, 45, 1000]),
    st.lists(st.tuples(st.sampled_from(["use", "use", "ahead", "retire"]), st.integers(0, 5)), max_size=40),
)  # fmt: skip
def test_what_is_read_ahead_and_never_used_changes_nothing_for_the_others(
    num_places: int, num_bytes: int, script: list[tuple[str, int]]
) -> None:
    """Two tables, one of them told to read ahead as well: what is used is read and freed alike in both."""
    tables = AdapterTable(num_places, num_bytes), AdapterTable(num_places, num_bytes)
    seen: list[list[Any]] = [[], []]

    def settle(is_ahead: bool, now: float) -> None:
        while actions := tables[is_ahead].plan():
            seen[is_ahead] += [action for action in actions if action.digest.startswith("used")]
            for action in actions:
                if isinstance(action, ReadAdapter):
                    tables[is_ahead].loaded(action.digest, 5 + 4 * int(action.digest[-1]), now)

    for turn, (what, number) in enumerate(script):
        for is_ahead, table in enumerate(tables):
            digest: Any = f"used{number}"
            if what == "use":
                one = sequence(f"r{turn}", digest, turn)
                table.announce(digest, f"/{digest}")
                table.join(one)
                settle(bool(is_ahead), float(turn))
                table.leave(one, float(turn))
            elif what == "retire":
                table.retire(digest)
            elif is_ahead:
                table.announce(f"ahead{number}", "/x", is_ahead=True)  # type: ignore[arg-type]
            settle(bool(is_ahead), float(turn))
            table.check()
    assert seen[0] == seen[1]


def test_while_sequences_wait_for_blocks_nothing_is_read_ahead() -> None:
    engine: Any = Engine(num_blocks=4, block_bytes=4, max_step_tokens=64)
    engine.add(make_request("running", [1] * 8, max_tokens=7))
    engine.step()
    engine.add(make_request("waiting", [2] * 8, max_tokens=7))
    engine.step()
    assert engine.core.scheduler.is_short
    engine.core.load_adapter("ahead", "/ahead", is_ahead=True)
    assert engine.core.adapter_actions() == []
    engine.drain()
    engine.step()
    assert engine.core.adapter_actions() == [ReadAdapter("ahead", "/ahead")]

"""Which adapters are read, kept and freed, action by action."""

from typing import Any

import pytest

from nearline.engine import AdapterTable, FreeAdapter, ReadAdapter, Sequence
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
    table.pin(running, 1.0)
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


def test_the_least_recently_used_unused_adapter_makes_place() -> None:
    table = AdapterTable(2, 1000)
    ready(table, "a", now=1.0)
    ready(table, "b", now=2.0)
    one = sequence("r", "a", 1)
    table.join(one)
    table.pin(one, 3.0)
    table.leave(one, 4.0)
    table.announce("c", "/c")
    assert table.plan() == [FreeAdapter("b"), ReadAdapter("c", "/c")]
    table.check()


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
    table.pin(running, 1.0)
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

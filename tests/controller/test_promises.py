"""Promises kept and broken, as the core counts them; early and honest refusals."""

import pytest

from nearline.controller import events as happened
from nearline.controller.config import CoreConfig
from nearline.controller.promises import Tally
from nearline.protocol import ModelId, SloClass, TenantId
from tests.controller.fleets import World, slo, world


def tally(w: World, slo_class: SloClass = SloClass.INTERACTIVE, tenant: str = "default") -> tuple[int, int, int]:
    row = w.core.fleet.promises.rows.get((ModelId("a"), slo_class, TenantId(tenant)), Tally())
    return (row.num_met, row.num_missed, row.num_refused)


def warm(num_answers: int = 10, seconds: float = 1.0, **settings: object) -> World:
    """A world with one instance of `a` whose answers have taken `seconds` each."""
    w = world("a", **settings)
    for n in range(num_answers):
        w.arrive(f"warm{n}")
        w.start_all()
        w.sleep(seconds)
        w.token(f"warm{n}")
        w.finish(f"warm{n}")
    w.core.fleet.promises.rows.clear()
    return w


ROWS = [
    ("in time", slo(), 19.0, 0.0, (1, 0, 0)),
    ("a late first token", slo(), 21.0, 0.0, (0, 1, 0)),
    ("in time for its own target", slo(ttft_s=0.5), 0.4, 0.0, (1, 0, 0)),
    ("too late for its own target", slo(ttft_s=0.5), 0.6, 0.0, (0, 1, 0)),
    ("at the asked pace", slo(tpot_s=0.5), 1.0, 0.9, (1, 0, 0)),
    ("slower than asked", slo(tpot_s=0.5), 1.0, 1.2, (0, 1, 0)),
]


@pytest.mark.parametrize(("what", "wish", "first_s", "rest_s", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_a_finished_request_counts(
    what: str, wish: object, first_s: float, rest_s: float, expected: tuple[int, int, int]
) -> None:
    w = world("a")
    w.arrive("r", slo=wish)
    w.start_all()
    w.sleep(first_s)
    w.token("r")
    w.sleep(rest_s)
    w.finish("r")  # three tokens
    assert tally(w) == expected


def test_classes_and_tenants_are_counted_apart_and_a_removed_model_is_forgotten() -> None:
    w = world("a")
    w.arrive("r1", slo=slo(slo_class=SloClass.BATCH_1H), tenant=TenantId("x"))
    w.start_all()
    w.sleep(100)
    w.token("r1")
    w.finish("r1")
    assert tally(w, SloClass.BATCH_1H, "x") == (1, 0, 0)
    assert tally(w) == (0, 0, 0)
    w.post(happened.ModelRemoved(ModelId("a")))
    assert w.core.fleet.promises.rows == {}


def test_a_caller_that_leaves_early_breaks_no_promise_of_ours() -> None:
    w = world("a")
    w.arrive("r1")
    w.cancel("r1")
    assert tally(w) == (0, 0, 0)
    w.arrive("r2")
    w.sleep(25)
    w.cancel("r2")
    assert tally(w) == (0, 1, 0)


def test_a_deadline_that_cannot_be_met_is_refused_at_once_and_one_that_can_is_not() -> None:
    w = warm(seconds=4.0)
    w.arrive("hopeless", slo=slo(deadline_s=0.5))
    w.arrive("fine", slo=slo(deadline_s=30.0))
    assert w.ended["hopeless"] == "slo_unattainable"  # type: ignore[index]
    assert "deadline" in w.errors["hopeless"].message  # type: ignore[index]
    assert w.errors["hopeless"].retry_after_s is None  # type: ignore[index]
    assert "fine" in w.open
    assert tally(w) == (0, 0, 1)


def test_a_model_without_history_refuses_nobody_for_a_deadline() -> None:
    w = world("a")
    w.arrive("r", slo=slo(deadline_s=0.1))
    assert "r" in w.open


def test_a_cold_model_counts_its_start_against_a_deadline() -> None:
    w = warm(seconds=1.0, keep_alive_s=1.0)
    w.sleep(10)
    assert w.instances() == []
    w.arrive("r1", slo=slo(deadline_s=1.2))  # 0.55 s to start, 1 s to answer
    w.arrive("r2", slo=slo(deadline_s=10.0))
    assert w.ended["r1"] == "slo_unattainable"  # type: ignore[index]
    assert "r2" in w.open


def test_overload_is_told_by_class_with_a_time_to_come_back() -> None:
    w = warm(seconds=30.0, config=CoreConfig(max_wait_targets=2.0))
    for n in range(60):
        w.arrive(f"r{n:02d}")
    refused = [name for name, how in w.ended.items() if how == "overloaded"]
    assert refused
    assert refused[0] > "r05", "some wait is allowed"
    assert all(1 <= (w.errors[name].retry_after_s or 0) <= 60 for name in refused)
    w.arrive("patient", slo=slo(slo_class=SloClass.BATCH_1H))
    assert "patient" in w.open, "an hour is enough for the same queue"


def test_the_queue_before_a_cold_model_is_never_refused_for_the_time_its_start_takes() -> None:
    w = warm(seconds=1.0, keep_alive_s=1.0, config=CoreConfig(max_wait_targets=0.01))
    w.sleep(10)
    for n in range(20):
        w.arrive(f"r{n}")
    assert not [how for name, how in w.ended.items() if name.startswith("r")]

"""Places inside instances: answers of looser classes give way and go on, what waits in vain moves."""

import pytest

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.config import CoreConfig
from nearline.controller.state import ModelRecord
from nearline.protocol import ModelId, RequestId, SloClass, TenantId
from tests.controller.fleets import MAX_RUNNING, World, model, report, slo, world

BATCH, HOUR, NOW = (slo(slo_class=c) for c in (SloClass.BATCH_1M, SloClass.BATCH_1H, SloClass.INTERACTIVE))
CONFIG = CoreConfig(dispatch_headroom=0)


def owner(w: World) -> ModelRecord:
    found = w.core.fleet.current_model(ModelId("a"))
    assert found is not None
    return found


def full_of(batch: object, config: CoreConfig = CONFIG, num: int = MAX_RUNNING) -> World:
    """One instance whose places are taken by batch requests that have begun to answer."""
    w = world("a", config=config)
    for n in range(num):
        w.arrive(f"b{n}", slo=batch)
    w.start_all()
    for n in range(num):
        w.token(f"b{n}")
    w.actions.clear()
    return w


def test_a_batch_answer_gives_way_once_an_interactive_request_would_be_late_and_not_before() -> None:
    w = full_of(BATCH)
    w.arrive("urgent", slo=NOW)
    assert "urgent" not in w.running()
    w.sleep(9.9)
    assert w.take(do.YieldPlace) == []
    w.sleep(0.2)
    (given,) = w.take(do.YieldPlace)
    assert given.request_id == f"b{MAX_RUNNING - 1}", "the last to come goes first"
    assert "urgent (interactive) is due in" in given.reason
    assert "urgent" in w.running()
    assert given.request_id in w.running(), "it stays in its engine, with its tokens"


def test_what_gave_way_goes_on_by_itself_and_ends_once() -> None:
    w = full_of(BATCH)
    w.arrive("urgent", slo=NOW)
    w.sleep(11)
    (given,) = w.take(do.YieldPlace)
    request = w.core.fleet.requests[given.request_id]
    assert (request.attempt, request.preempted_at is not None) == (1, True)
    w.token("urgent")
    w.finish("urgent")
    assert request.preempted_at is None, "the place is its own again"
    w.arrive("next", slo=BATCH)
    assert "next" not in w.running(), "and is not given away twice"
    w.finish(given.request_id)
    assert w.ended[given.request_id] == "finished"
    assert "next" in w.running()


@pytest.mark.parametrize(
    ("batch", "urgent", "why"),
    [
        (NOW, NOW, "its own class"),
        (NOW, BATCH, "a stricter class"),
        (slo(slo_class=SloClass.BATCH_1M, tpot_s=0.1), NOW, "a promised pace"),
        (slo(60.0, slo_class=SloClass.BATCH_1M), NOW, "a deadline that is near"),
    ],
)
def test_nobody_gives_way_who_has(batch: object, urgent: object, why: str) -> None:
    w = full_of(batch)
    w.arrive("urgent", slo=urgent)
    w.sleep(40)
    assert w.take(do.YieldPlace) == [], why


@pytest.mark.parametrize(
    ("running", "first", "arrives_s", "second", "by_s", "why"),
    [
        (HOUR, NOW, 25.0, NOW, 10.1, "is late already"),
        (HOUR, NOW, 0.0, slo(ttft_s=4.0), 2.1, "can wait longer"),
        (BATCH, BATCH, 45.0, NOW, 10.1, "has nobody looser to give way"),
        (BATCH, slo(ttft_s=60.0, slo_class=SloClass.BATCH_1H), 45.0, NOW, 10.1, "is of the loosest class"),
    ],
)
def test_another_tenants_request_stops_nobody_though_it_is_the_next_and(
    running: object, first: object, arrives_s: float, second: object, by_s: float, why: str
) -> None:
    w = world("a", config=CONFIG)
    for n in range(MAX_RUNNING):
        w.arrive(f"b{n}", slo=running)
    w.start_all()
    w.arrive("x", slo=first, tenant=TenantId("t1"))
    w.sleep(arrives_s)
    w.arrive("y", slo=second, tenant=TenantId("t2"))
    assert [r.info.request_id for r in owner(w).queue.candidates(w.now)] == ["x", "y"]
    for n in range(MAX_RUNNING):
        w.token(f"b{n}")
    w.sleep(by_s)
    assert "y" in w.running(), f"the other one {why}"
    assert "x" not in w.running()


def test_without_a_first_token_or_with_preemption_off_nobody_gives_way() -> None:
    w = world("a", config=CONFIG)
    for n in range(MAX_RUNNING):
        w.arrive(f"b{n}", slo=BATCH)
    w.start_all()
    w.arrive("urgent", slo=NOW)
    w.sleep(15)
    assert w.take(do.YieldPlace) == []
    off = full_of(BATCH, CoreConfig(dispatch_headroom=0, max_preemptions=0))
    off.arrive("urgent", slo=NOW)
    off.sleep(15)
    assert off.take(do.YieldPlace) == []


def num_given_way(answer_s: float) -> int:
    """After a dozen answers of so many seconds: how many batch answers give way to an urgent request in its 19 s."""
    w = world("a", config=CONFIG)
    for n in range(12):
        w.arrive(f"h{n}")
        w.start_all()
        w.token(f"h{n}")
        w.sleep(answer_s)
        w.finish(f"h{n}")
    for n in range(MAX_RUNNING):
        w.arrive(f"b{n}", slo=HOUR)
        w.token(f"b{n}")
    w.arrive("urgent", slo=NOW)
    w.sleep(19.0)
    return len(w.take(do.YieldPlace))


def test_nobody_gives_way_where_places_come_free_soon_enough_by_themselves() -> None:
    assert num_given_way(1.0) == 0
    assert num_given_way(100.0) == 1, "the control: the next place is expected in 25 s"


def flood(config: CoreConfig) -> float:
    """Urgent requests for 200 s, always more than there are places; return how long a preempted answer waited."""
    w = full_of(HOUR, config)
    preempted_at: dict[RequestId, float] = {}
    longest_s, serial = 0.0, 0
    for tick in range(400):
        if sum(name.startswith("u") for name in w.open) < 12:
            serial += 1
            w.arrive(f"u{serial}", slo=NOW)
        w.sleep(0.5)
        for given in w.take(do.YieldPlace):
            preempted_at[given.request_id] = w.now
        for name in [name for name in w.running() if name.startswith("u") and tick % 8 == 0]:
            w.token(name)
            w.finish(name)
        for name in [name for name in preempted_at if w.core.fleet.requests[name].preempted_at is None]:
            longest_s = max(longest_s, w.now - preempted_at.pop(name))
    return max([longest_s, *(w.now - at for at in preempted_at.values())])


def test_under_a_flood_of_urgent_requests_a_preempted_answer_goes_on_within_its_bound() -> None:
    """The bound, and the 4 s until a place comes free. The control: without a bound it waits for all of the flood."""
    bounded = flood(CoreConfig(dispatch_headroom=0, max_preempted_target_s=60.0))
    assert 0 < bounded <= 0.5 * 60.0 + 4.5
    assert flood(CoreConfig(dispatch_headroom=0, max_preempted_target_s=3600.0)) > 150


def test_an_answer_is_interrupted_at_most_so_often() -> None:
    w = full_of(HOUR, CoreConfig(dispatch_headroom=0, max_preemptions=2))
    count = 0
    for n in range(60):
        w.arrive(f"u{n}", slo=NOW)
        w.sleep(11)
        count += len(w.take(do.YieldPlace))
        for name in [name for name in w.running() if name.startswith("u")]:
            w.token(name)
            w.finish(name)
    assert count == 2 * MAX_RUNNING
    assert max(r.num_preemptions for r in w.core.fleet.requests.values()) == 2


def two_replicas() -> World:
    w = World(CoreConfig(scale_out_factor=0.1))
    w.post(happened.ModelAdded(model("a", max_replicas=2)))
    w.add_node(report("n1", 1, ["digest-of-a"]))
    for n in range(MAX_RUNNING + 2):
        w.arrive(f"r{n}")
    w.start_all()
    w.arrive("more")
    w.add_node(report("n2", 1, ["digest-of-a"]))
    return w


def test_what_waits_inside_one_replica_moves_to_the_place_that_came_free_in_another() -> None:
    w = two_replicas()
    first = w.instances()[0]
    assert len(first.sequences) == MAX_RUNNING + 2
    for n in range(MAX_RUNNING):
        w.token(f"r{n}")
    w.start_all()
    second = w.instances()[1]
    assert set(second.sequences) == {"more", "r5", "r4"}
    aborts = w.take(do.AbortSequence)
    assert [abort.request_id for abort in aborts] == ["r5", "r4"]
    assert all("it moves" in abort.reason for abort in aborts)
    assert len(first.sequences) == MAX_RUNNING
    assert w.core.fleet.requests[RequestId("r5")].attempt == 2


def test_nothing_moves_to_and_fro() -> None:
    w = two_replicas()
    w.start_all()
    for n in range(MAX_RUNNING):
        w.token(f"r{n}")
    for _ in range(50):
        w.sleep(1)
        w.post(happened.NodeReported(next(iter(w.nodes.values())).full_report()))
    assert len(w.take(do.AbortSequence)) <= 2
    assert all(request.num_moves <= 1 for request in w.core.fleet.requests.values())


def two_models(running: object, waiting: object) -> World:
    """Model b waits for the only slot, in which a answers."""
    w = world("a", "b")
    w.arrive("long", "a", slo=running)
    w.start_all()
    w.token("long")
    w.sleep(5)
    w.arrive("mine", "b", slo=waiting)
    w.sleep(10.1)
    return w


def test_for_an_interactive_request_of_another_model_batch_answers_leave_the_slot_at_once_with_their_tokens() -> None:
    w = two_models(BATCH, NOW)
    (stop,) = w.take(do.StopInstance)
    assert stop.drain_s == 0.0
    w.drain_ends(w.instances()[0])
    w.start_all()
    assert set(w.running()) == {"mine"}
    assert w.core.fleet.requests[RequestId("long")].num_losses == 1
    w.finish("mine")
    w.sleep(31)
    w.start_all()
    w.finish("long")
    assert w.ended == {"long": "finished", "mine": "finished"}


def test_interactive_answers_of_another_model_may_drain() -> None:
    (stop,) = two_models(NOW, NOW).take(do.StopInstance)
    assert stop.drain_s == CoreConfig().swap_drain_s


def test_neither_class_starves_when_two_models_want_one_slot_and_swaps_stay_rare() -> None:
    """Bound: each gets the slot within its wait bound (10 and 30 s), the other's drain (30 s) and a start; a slot is
    kept for four starts at least."""
    w = world("a", "b", config=CoreConfig(swap_drain_s=30.0))
    waited: dict[str, float] = {"a": 0.0, "b": 0.0}
    for tick in range(600):
        for name, kind in (("a", NOW), ("b", BATCH)):
            if sum(r.info.model_id == name for r in w.core.fleet.requests.values()) < 3:
                w.arrive(f"{name}{tick}", name, slo=kind)
            record = w.core.fleet.current_model(ModelId(name))
            if record is not None and record.starved_since is not None:
                waited[name] = max(waited[name], w.now - record.starved_since)
        w.sleep(1.0)
        for instance in w.instances():
            w.drain_ends(instance)
        w.start_all()
        for name in sorted(w.running()):
            if tick % 3 == 0:
                w.token(name)
                w.finish(name)
    num_starts = len(w.take(do.EnsureInstance))
    assert 0 < waited["a"] <= 10 + 30 + 3
    assert 0 < waited["b"] <= 30 + 30 + 3
    assert 10 <= num_starts <= 2 * 600 / 30 + 1, "two swaps in each round of a 10 s and a 30 s bound, less two ticks"

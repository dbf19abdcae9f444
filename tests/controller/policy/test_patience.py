"""Waiting for a slot near the bytes: a table of situations, and the bound through the core."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.policy.patience import Soon, worth_waiting
from nearline.controller.policy.placement import Need, Placement
from nearline.controller.state import NodeRecord
from nearline.protocol import Digest, NodeId
from tests.controller.fleets import GB, World, model, report, resident

NEED = Need(Digest("d"), 10 * GB)
FAR = Placement(NodeId("far"), 0, 5.05, (), (), "starts from ssd")


def node(name: str, dram_bytes: int, free_bytes: int = 32 * GB) -> NodeRecord:
    made = NodeRecord(report(name, residency=(resident("d", 10 * GB, dram_bytes),), dram_free_bytes=free_bytes))
    made.apply(made.report)
    return made


TABLE = [
    ("a near slot comes free soon", 1.0, 32 * GB, True),
    ("it comes free too late", 8.0, 32 * GB, False),
    ("later than the read and the two that it costs others", 14.8, 0, False),
    ("late, but reading again would push out what others need", 8.0, 0, True),
    ("never", float("inf"), 0, False),
]


@pytest.mark.parametrize(("what", "free_in_s", "free_bytes", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_it_is_worth_waiting(what: str, free_in_s: float, free_bytes: int, expected: bool) -> None:
    near, far = node("near", 10 * GB), node("far", 0, free_bytes)
    near.instances["x"] = SimpleNamespace(is_acknowledged=True)  # type: ignore[index, assignment]
    soon = worth_waiting([near, far], NEED, FAR, lambda _: 100.0 + free_in_s, 100.0)
    assert (soon == Soon(NodeId("near"), 100.0 + free_in_s)) is expected


def test_a_place_that_has_the_bytes_itself_is_taken_at_once() -> None:
    here = replace(FAR, node_id=NodeId("near"))
    assert worth_waiting([node("near", 10 * GB), node("other", 10 * GB)], NEED, here, lambda _: 0.0, 0.0) is None


def two_nodes(pool_bytes: int) -> World:
    """Node n1 has the bytes of both models in DRAM and serves `a`; n2 has `b` on its disk, 10 s away, and stands free.
    Then somebody calls `b`."""
    w = World()
    for name in ("a", "b"):
        w.post(happened.ModelAdded(model(name, num_bytes=20 * GB)))
    rows = (resident("digest-of-a", 20 * GB, 20 * GB), resident("digest-of-b", 20 * GB, 20 * GB))
    w.add_node(report("n1", residency=rows))
    w.arrive("r1", "a")
    w.start_all()
    w.token("r1")
    rows = (resident("digest-of-a", 20 * GB), resident("digest-of-b", 20 * GB))
    w.add_node(report("n2", residency=rows, dram_pool_bytes=pool_bytes))
    w.take(do.EnsureInstance)
    w.arrive("r2", "b")
    assert w.take(do.EnsureInstance) == [], "n1 has the bytes in DRAM and should be free soon"
    return w


def test_past_its_wait_bound_a_model_takes_a_place_that_costs_nobody_anything() -> None:
    w = two_nodes(pool_bytes=64 * GB)
    w.sleep(9.9)
    assert w.take(do.EnsureInstance) == []
    w.sleep(0.2)
    (start,) = w.take(do.EnsureInstance)
    assert start.node_id == "n2", "r1 still runs after half the target of 20 s"
    assert w.take(do.StopInstance) == []


def test_where_dram_cannot_hold_all_models_the_slot_near_the_bytes_is_asked_for_past_the_bound() -> None:
    w = two_nodes(pool_bytes=32 * GB)
    w.sleep(9.9)
    assert w.take(do.StopInstance) == []
    w.sleep(0.2)
    (stop,) = w.take(do.StopInstance)
    assert stop.node_id == "n1"
    w.finish("r1")
    w.sleep(1)
    (start,) = w.take(do.EnsureInstance)
    assert start.node_id == "n1"


def test_models_that_wait_for_the_one_slot_near_their_bytes_each_get_it_within_their_turns() -> None:
    """Every stream goes on for ever, so each turn is cut off after the drain; elsewhere a slot stands free, 10 s away,
    where each read would take room from others."""
    w, names, begun = World(), ("a", "b", "c", "d"), dict[str, float]()
    for name in names:
        w.post(happened.ModelAdded(model(name, num_bytes=20 * GB)))
    w.add_node(report("n1", residency=tuple(resident(f"digest-of-{name}", 20 * GB, 20 * GB) for name in names)))
    w.arrive("of-a", "a")
    w.start_all()
    far = tuple(resident(f"digest-of-{name}", 20 * GB) for name in names)
    w.add_node(report("n2", residency=far, dram_pool_bytes=32 * GB))
    for name in names[1:]:
        w.arrive(f"of-{name}", name)
    start_s, step_s = 0.5, 0.25
    for _ in range(800):
        w.sleep(step_s)
        for instance in w.instances():
            record = w.core.fleet.instances[instance.spec.instance_id]
            if record.is_stopping and w.now >= record.stop_by:
                w.drain_ends(instance)
            elif w.now >= record.created_at + start_s:
                w.start(instance)
        for request_id in [request_id for request_id in w.running() if request_id not in begun]:
            begun[request_id] = w.now
            w.token(request_id)
    waits = sorted(begun[f"of-{name}"] for name in names[1:])
    turn_s = 10.0 + 30.0 + start_s + 4 * step_s
    assert all(wait <= n * turn_s for n, wait in enumerate(waits, 1)), waits

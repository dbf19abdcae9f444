"""Arrivals hammered around every keep-alive timeout: the model neither hangs nor loses a request."""

from random import Random

import pytest

from nearline.controller import actions as do
from tests.controller.fleets import world


@pytest.mark.parametrize("seed", range(4))
def test_requests_around_the_timeout_are_all_answered_for_ten_minutes(seed: int) -> None:
    """Each request comes within 50 ms of the instant at which the idle instance would stop; stopping takes a while."""
    chance, keep_alive_s = Random(seed), 1.0
    w = world("a", keep_alive_s=keep_alive_s)
    num_requests = num_warm = 0
    while w.now < 600.0:
        w.arrive(f"r{num_requests}")
        num_requests += 1
        num_warm += len(w.take(do.EnsureInstance)) == 0
        for _ in range(100):
            w.start_all()
            if w.running():
                break
            w.sleep(0.02)
        (name,) = w.running()
        w.finish(name)
        w.sleep(keep_alive_s + chance.choice((-0.05, -1e-9, 0.0, 1e-9, 0.05)))
    assert len(w.ended) == num_requests > 500
    assert set(w.ended.values()) == {"finished"}
    assert 0.2 < num_warm / num_requests < 0.8, "both outcomes of the race occurred"
    assert not w.open


def test_requests_that_come_while_the_instance_is_stopping_get_a_new_one() -> None:
    w = world("a", keep_alive_s=1.0)
    w.arrive("r1")
    w.start_all()
    w.finish("r1")
    w.now += 1.0
    w.nodes["n1"].instances["a.0.1"].sequences = {"stuck": 1}  # type: ignore[dict-item, index]
    w.sleep(0.0)
    assert len(w.take(do.StopInstance)) == 1
    w.arrive("r2")
    assert len(w.take(do.EnsureInstance)) == 1, "only the first: its slot is still taken"
    instance = w.instances()[0]
    instance.sequences.clear()
    w.drain_ends(instance)
    w.start_all()
    w.finish("r2")
    assert w.ended == {"r1": "finished", "r2": "finished"}

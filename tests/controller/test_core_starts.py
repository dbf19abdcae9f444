"""ControllerCore and starts: an instance serves once it is bound, its start is over once its bytes are there."""

import pytest

from nearline.controller import actions as do
from nearline.controller.config import CoreConfig
from nearline.protocol import InstanceState, NodeId, RequestId
from nearline.protocol.errors import ErrorInfo, Fault
from tests.controller.fleets import world


def test_requests_are_dispatched_before_the_bytes_are_there() -> None:
    w = world("a")
    w.arrive("r1")
    w.bind(w.instances()[0])
    assert list(w.running()) == ["r1"]


def test_the_storage_link_is_taken_until_the_bytes_are_there() -> None:
    w = world("a", "b", num_slots=2)
    w.arrive("r1", "a")
    w.sleep(0.2)
    (reading,) = w.instances()
    w.bind(reading)
    node = w.core.fleet.nodes[NodeId("n1")]
    assert node.storage_free_at == pytest.approx(0.5), "1 GB at 2 GB/s"
    w.take(do.EnsureInstance)
    w.arrive("r2", "b")
    (start,) = w.take(do.EnsureInstance)
    assert start.estimate_s == pytest.approx(0.3 + 0.5 + 0.05)
    w.load(reading)
    assert node.storage_free_at > w.now, "the other one still reads"
    w.start_all()
    assert node.storage_free_at == w.now


def test_an_instance_keeps_its_slot_for_a_multiple_of_its_whole_start() -> None:
    w = world("a", "b", config=CoreConfig(residence_factor=4.0))
    w.arrive("r1", "a")
    (first,) = w.instances()
    w.bind(first)
    w.arrive("r2", "b")
    w.finish("r1")
    w.sleep(2.0)
    assert first.state is InstanceState.READY, "a start under way is never stopped for another model"
    w.load(first)
    w.sleep(7.9)
    assert first.state is InstanceState.READY
    w.sleep(0.2)
    assert [instance.spec.model_id for instance in w.instances()] == ["b"], "four times two seconds are over"


def test_instances_that_always_die_over_their_bytes_are_given_up_in_the_end() -> None:
    w = world("a", config=CoreConfig(max_start_failures=3, max_fruitless_losses=2))
    w.arrive("r1")
    for _ in range(3):
        assert "r1" not in w.ended
        w.sleep(60.0)
        (instance,) = w.instances()
        w.bind(instance)
        w.move(instance, InstanceState.FAILED, ErrorInfo.of(Fault("the disk does not answer")))
    assert w.ended == {"r1": "fault"}
    assert "the disk does not answer" in w.errors[RequestId("r1")].message

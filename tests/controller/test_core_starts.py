"""ControllerCore and starts: an instance serves once it is bound, its start is over once its bytes are there."""

import pytest

from nearline.controller import actions as do
from nearline.controller.config import CoreConfig
from nearline.protocol import InstanceState, NodeId, RequestId
from nearline.protocol.errors import ErrorInfo, Fault
from tests.controller.fleets import report, world


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


@pytest.mark.parametrize("is_bound", [False, True])
def test_bytes_that_one_node_cannot_read_are_read_on_another(is_bound: bool) -> None:
    w = world("a", config=CoreConfig(max_fruitless_losses=2))
    w.add_node(report("n2", digests=["digest-of-a"], bind_s=9.0))
    rotten = ErrorInfo("checkpoint_corrupt", "chunk 3 is rotten").while_serving("digest-of-a")
    w.arrive("r1")
    (first,) = w.instances()
    assert w.node_of(first).report.node_id == "n1"
    if is_bound:
        w.bind(first)
        w.finish("r1", rotten)
    w.move(first, InstanceState.FAILED, rotten)
    w.sleep(5.0)
    (second,) = w.instances()
    assert w.node_of(second).report.node_id == "n2"
    w.start(second)
    w.finish("r1")
    assert w.ended == {"r1": "finished"}


def test_bytes_that_nobody_can_read_are_our_fault_and_named() -> None:
    w = world("a")
    w.arrive("r1")
    rotten = ErrorInfo("checkpoint_corrupt", "chunk 3 is rotten").while_serving("digest-of-a")
    while "r1" not in w.ended:
        assert w.now < 60
        w.sleep(1.0)
        for instance in w.instances():
            w.move(instance, InstanceState.FAILED, rotten)
    error = w.errors[RequestId("r1")].exception()
    assert (error.code, error.status) == ("checkpoint_unreadable", 500)
    assert "digest-of-a" in error.message


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

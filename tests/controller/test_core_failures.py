"""ControllerCore when starts fail and engines die, in virtual time."""

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.protocol import (
    FinishReason,
    InstanceState,
    NodeId,
    RequestId,
)
from nearline.protocol.errors import CheckpointCorrupt, ErrorInfo, InstanceFailed
from tests.controller.fleets import (
    FakeInstance,
    World,
    report,
    world,
)


def only_instance(w: World) -> FakeInstance:
    (instance,) = w.instances()
    return instance


def test_a_failed_start_is_retried_with_growing_pauses_then_the_waiting_get_its_error() -> None:
    w = world("a")
    w.arrive("r1")
    for pause in (0.5, 1.0):
        w.crash(only_instance(w), "device fell off")
        assert w.instances() == []
        w.sleep(pause - 0.01)
        assert w.instances() == []
        w.sleep(0.02)
    w.crash(only_instance(w), "device fell off")
    assert w.ended == {"r1": "instance_failed"}
    assert w.errors[RequestId("r1")].message == "device fell off"
    w.sleep(60)
    assert w.instances() == [], "nobody waits, nothing starts"
    w.arrive("r2")
    w.start_all()
    w.finish("r2")
    assert w.ended["r2"] == "finished", "a failure does not stick"


def test_a_start_that_cannot_succeed_is_not_repeated() -> None:
    w = world("a")
    w.arrive("r1")
    w.move(only_instance(w), InstanceState.FAILED, ErrorInfo.of(CheckpointCorrupt("chunk 3 of x is torn")))
    assert w.ended == {"r1": "checkpoint_corrupt"}


def test_a_failed_start_is_tried_elsewhere_first() -> None:
    w = world("a")
    w.add_node(report("n2", digests=["digest-of-a"], bind_s=9.0))
    w.arrive("r1")
    assert w.take(do.EnsureInstance)[0].node_id == "n1"
    w.crash(only_instance(w))
    w.sleep(1)
    assert w.take(do.EnsureInstance)[0].node_id == "n2"


def test_an_engine_killed_twenty_times_in_mid_stream_costs_the_request_nothing_but_time() -> None:
    w = world("a")
    w.arrive("r1")
    for _ in range(20):
        w.start_all()
        w.token("r1")
        w.crash(only_instance(w))
    w.start_all()
    assert [d.attempt for d in w.take(do.Dispatch)] == list(range(1, 22))
    w.finish("r1")
    assert w.ended == {"r1": "finished"}


def test_a_request_that_kills_engines_fails_alone() -> None:
    w = world("a")
    for name in ("good1", "poison", "good2"):
        w.arrive(name)
    for _ in range(20):
        w.sleep(1)
        w.start_all()
        running = w.running()
        if RequestId("poison") in running:
            w.crash(running[RequestId("poison")][1])
            continue
        for name in running:
            w.token(name)
            w.finish(name)
    assert w.ended == {"good1": "finished", "poison": "instance_failed", "good2": "finished"}
    assert "3 instances in a row" in w.errors[RequestId("poison")].message


def test_an_error_that_lies_in_the_request_ends_it_and_one_that_lies_in_the_instance_does_not() -> None:
    w = world("a")
    w.arrive("r1")
    w.arrive("r2")
    w.start_all()
    w.finish("r1", ErrorInfo("context_length_exceeded", "too long"))
    assert w.ended == {"r1": "context_length_exceeded"}
    w.finish("r2", ErrorInfo.of(InstanceFailed("engine is gone")))
    assert [d.attempt for d in w.take(do.Dispatch) if d.request_id == "r2"] == [1], "is the instance dead? wait"
    w.post(happened.NodeReported(w.nodes[NodeId("n1")].full_report()))
    assert [d.attempt for d in w.take(do.Dispatch) if d.request_id == "r2"] == [2]


def test_a_crash_that_is_told_twice_counts_once() -> None:
    """The node ends the sequences of a dead engine first, and says that the instance failed a moment later."""
    w = world("a")
    w.arrive("r1")
    for n in range(20):
        w.start_all()
        w.token("r1")
        instance = only_instance(w)
        w.finish("r1", ErrorInfo.of(InstanceFailed("killed")))
        w.crash(instance)
        assert w.core.fleet.requests[RequestId("r1")].num_losses == n + 1
    w.start_all()
    w.finish("r1")
    assert w.ended == {"r1": "finished"}


def test_updates_of_an_attempt_that_was_given_up_change_nothing() -> None:
    w = world("a")
    w.arrive("r1")
    w.start_all()
    w.crash(only_instance(w))
    w.start_all()
    w.post(happened.SequenceEnded(RequestId("r1"), 1, FinishReason.STOP, 3))
    assert w.ended == {}
    w.finish("r1")
    assert w.ended == {"r1": "finished"}

"""ControllerCore when machines come, go and come back."""

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.config import CoreConfig
from nearline.protocol import Digest, InstanceId, InstanceSpec, InstanceState, ModelId, NodeId
from tests.controller.fleets import FakeInstance, World, checkpoint, model, report, world


def running_stream() -> World:
    w = world("a", keep_alive_s=60.0)
    w.arrive("r1")
    w.start_all()
    w.token("r1")
    return w


def test_a_link_that_comes_back_within_the_grace_resumes_on_the_same_instance() -> None:
    w = running_stream()
    w.disconnect(w.nodes[NodeId("n1")])
    w.sleep(0.9)
    w.connect(w.nodes[NodeId("n1")])
    assert [(d.instance_id, d.attempt) for d in w.take(do.Dispatch)] == [("a.0.1", 1), ("a.0.1", 2)]
    assert len(w.take(do.EnsureInstance)) == 1
    w.finish("r1")


def test_a_link_that_is_replaced_without_a_break_voids_what_ran_over_it() -> None:
    w = running_stream()
    w.connect(w.nodes[NodeId("n1")])
    assert [d.attempt for d in w.take(do.Dispatch)] == [1, 2]


def test_models_that_wait_while_every_node_is_gone_start_when_one_returns() -> None:
    w = world("a", "b", "c")
    node = w.nodes[NodeId("n1")]
    w.disconnect(node)
    for name in ("a", "b", "c"):
        w.arrive(f"r-{name}", name)
    w.sleep(0.5)
    assert w.take(do.EnsureInstance) == []
    w.connect(node)
    assert len(w.take(do.EnsureInstance)) == 1


def test_another_node_takes_over_after_the_grace() -> None:
    w = running_stream()
    w.add_node(report("n2", digests=["digest-of-a"]))
    w.disconnect(w.nodes[NodeId("n1")])
    w.sleep(0.9)
    assert len(w.take(do.EnsureInstance)) == 1
    w.sleep(0.2)
    assert [start.node_id for start in w.take(do.EnsureInstance)] == ["n2"]
    w.start_all()
    assert w.take(do.Dispatch)[-1].attempt == 2
    w.finish("r1")
    assert w.ended == {"r1": "finished"}


def test_a_node_that_returns_late_keeps_its_instance_which_is_adopted() -> None:
    w = running_stream()
    node = w.nodes[NodeId("n1")]
    w.disconnect(node)
    w.sleep(5)
    w.connect(node)
    assert len(w.take(do.EnsureInstance)) == 1, "only the first"
    assert w.take(do.Dispatch)[-1].instance_id == "a.0.1"
    w.finish("r1")


def test_a_restarted_agent_without_its_instances_gets_new_ones() -> None:
    w = running_stream()
    node = w.nodes[NodeId("n1")]
    w.disconnect(node)
    node.instances.clear()
    w.connect(node)
    w.start_all()
    assert [d.instance_id for d in w.take(do.Dispatch)] == ["a.0.1", "a.0.2"]
    w.finish("r1")
    assert w.ended == {"r1": "finished"}


def test_a_wish_that_was_lost_with_the_link_is_repeated() -> None:
    w = world("a")
    node = w.nodes[NodeId("n1")]
    node.is_connected = False  # the link is broken, but nobody knows yet
    w.arrive("r1")
    w.connect(node)
    (first, second) = w.take(do.EnsureInstance)
    assert first.spec == second.spec
    w.start_all()
    w.finish("r1")


def test_a_stop_that_was_lost_with_the_link_is_repeated() -> None:
    w = world("a", keep_alive_s=10.0)
    w.arrive("r1")
    w.start_all()
    w.finish("r1")
    node = w.nodes[NodeId("n1")]
    node.is_connected = False
    w.sleep(10.5)
    assert len(w.take(do.StopInstance)) == 1
    w.connect(node)
    assert len(w.take(do.StopInstance)) == 1
    assert w.instances() == []


def test_an_instance_that_does_not_stop_is_told_again_without_patience() -> None:
    w = world("a", "b")
    w.arrive("r1", "a")
    w.start_all()
    instance = w.instances()[0]
    w.arrive("r2", "b")
    w.sleep(10.1)
    assert [s.drain_s for s in w.take(do.StopInstance)] == [30.0]
    w.sleep(45.1)
    assert [s.drain_s for s in w.take(do.StopInstance)] == [0.0]
    assert instance.state is InstanceState.DRAINING


def test_a_new_controller_adopts_what_runs_and_still_lets_it_go_when_idle() -> None:
    w = World(CoreConfig(epoch="2"))
    w.post(happened.ModelAdded(model("a", keep_alive_s=30.0)))
    node = report(digests=["digest-of-a"])
    w.add_node(node)
    spec = InstanceSpec(InstanceId("a.1.7"), ModelId("a"), Digest("digest-of-a"))
    stranger = InstanceSpec(InstanceId("x.1.8"), ModelId("x"), Digest("gone"))
    for item in (spec, stranger):
        made = FakeInstance(item, InstanceState.READY)
        w.nodes[NodeId("n1")].instances[item.instance_id] = made
    w.nodes[NodeId("n1")].report = report(num_slots=2, digests=["digest-of-a"])
    w.connect(w.nodes[NodeId("n1")])
    assert [s.instance_id for s in w.take(do.StopInstance)] == ["x.1.8"]
    w.arrive("r1")
    assert w.take(do.Dispatch)[0].instance_id == "a.1.7"
    w.finish("r1")
    w.sleep(31)
    assert w.instances() == []
    assert w.take(do.EnsureInstance) == []
    assert w.take(do.DeleteCheckpoint) == [], "what nobody registered is nobody's to delete"


def test_an_import_counts_before_the_next_report() -> None:
    w = World()
    w.add_node(report())
    w.post(happened.CheckpointImported(NodeId("n1"), checkpoint("digest-of-a")))
    w.post(happened.ModelAdded(model("a")))
    w.arrive("r1")
    assert [s.node_id for s in w.take(do.EnsureInstance)] == ["n1"]

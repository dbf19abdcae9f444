"""A replica that must be there gets its bytes brought to where it can run; why it is missing is said until then."""

from typing import Any

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.config import CoreConfig
from nearline.controller.snapshot import snapshot
from nearline.protocol import Digest, NodeId, RequestId, Residency
from nearline.protocol.errors import ErrorInfo, NodeLost
from tests.controller.fleets import GB, World, checkpoint, model, report, world

DIGEST = Digest("digest-of-a")
LOST = ErrorInfo.of(NodeLost("the peer does not answer"))


def missing(w: World) -> tuple[int, str]:
    (row,) = snapshot(w.core.fleet, {}, w.now)["models"]
    return row["num_missing"], row["missing_because"] or ""


def two_wanted(**settings: Any) -> World:
    """One slot on the node with the bytes, two replicas wanted."""
    w = World(CoreConfig(start_backoff_s=2.0))
    w.post(happened.ModelAdded(model("a", min_replicas=2, max_replicas=2, **settings)))
    w.add_node(report("n1", digests=[DIGEST]))
    w.start_all()
    return w


def test_the_bytes_are_copied_to_a_node_with_a_place_and_the_replica_starts_there() -> None:
    w = two_wanted()
    assert [action.node_id for action in w.take(do.EnsureInstance)] == ["n1"]
    assert missing(w)[0] == 1
    assert "no other node has a free slot" in missing(w)[1]
    w.add_node(report("n2"))
    (copy,) = w.take(do.CopyCheckpoint)
    assert (copy.node_id, copy.checkpoint) == ("n2", checkpoint(DIGEST))
    assert missing(w) == (1, "its bytes are being copied to n2")
    w.post(happened.NodeReported(w.nodes[NodeId("n2")].full_report()))
    assert w.take(do.CopyCheckpoint) == [], "one copy at a time"
    w.post(happened.CheckpointImported(NodeId("n2"), checkpoint(DIGEST)))
    assert [action.node_id for action in w.take(do.EnsureInstance)] == ["n2"]
    assert missing(w) == (0, "")


def test_a_copy_that_fails_is_tried_again_after_a_pause_and_its_error_is_told() -> None:
    w = two_wanted()
    w.add_node(report("n2"))
    assert len(w.take(do.CopyCheckpoint)) == 1
    w.post(happened.CopyFailed(NodeId("n2"), DIGEST, LOST))
    assert "copying its bytes to n2 failed: the peer does not answer; the next try is in 2 s" in missing(w)[1]
    w.sleep(1.9)
    assert w.take(do.CopyCheckpoint) == []
    w.sleep(0.2)
    assert len(w.take(do.CopyCheckpoint)) == 1
    w.post(happened.CopyFailed(NodeId("n2"), DIGEST, LOST))
    w.sleep(3.9)
    assert w.take(do.CopyCheckpoint) == [], "the pause has doubled"


def test_bytes_that_arrive_and_turn_out_to_be_others_are_not_copied_again_at_once() -> None:
    w = two_wanted()
    node = w.add_node(report("n2"))
    assert len(w.take(do.CopyCheckpoint)) == 1
    w.post(happened.CheckpointImported(NodeId("n2"), checkpoint(DIGEST)))
    w.post(happened.CopyFailed(NodeId("n2"), DIGEST, LOST))
    node.instances.clear()
    w.connect(node)
    assert missing(w)[0] == 1
    assert w.take(do.CopyCheckpoint) == []
    w.sleep(2.1)
    assert len(w.take(do.CopyCheckpoint)) == 1


def test_bytes_go_only_where_a_replica_could_start_at_once() -> None:
    w = two_wanted()
    w.add_node(report("full", ssd_free_bytes=GB // 2))
    w.add_node(report("small", dram_pool_bytes=GB // 2, devices=()))
    assert w.take(do.CopyCheckpoint) == []
    assert missing(w)[0] == 1
    w.add_node(report("b", ssd_free_bytes=90 * GB))
    assert [copy.node_id for copy in w.take(do.CopyCheckpoint)] == ["b"]


def test_two_models_go_to_two_nodes_first_to_the_one_with_most_disk_left() -> None:
    w = World()
    w.add_node(report("n2", ssd_free_bytes=70 * GB))
    w.add_node(report("n3", ssd_free_bytes=90 * GB))
    for name in ("a", "b"):
        w.add_node(report(f"home-of-{name}", digests=[f"digest-of-{name}"]))
        w.post(happened.ModelAdded(model(name, min_replicas=2, max_replicas=2)))
    assert [copy.node_id for copy in w.take(do.CopyCheckpoint)] == ["n3", "n2"]


def test_a_queue_alone_has_nothing_copied() -> None:
    w = world("a", "b")
    w.add_node(report("n2"))
    w.arrive("r1", "a")
    w.start_all()
    w.arrive("r2", "b")
    assert w.take(do.CopyCheckpoint) == [], "a slot is free before the bytes were there"


def held_by_minimums() -> World:
    """b's bytes are on n1 alone, and a, which must be there, has its one slot."""
    w = World()
    for one in (model("a", min_replicas=1, keep_alive_s=1.0), model("b")):
        w.post(happened.ModelAdded(one))
    w.add_node(report("n1", digests=[DIGEST, "digest-of-b"]))
    w.start_all()
    return w


def test_who_waits_for_slots_that_minimums_keep_gets_its_bytes_where_one_is_free() -> None:
    w = held_by_minimums()
    w.add_node(report("n2"))
    w.arrive("r", "b")
    (copy,) = w.take(do.CopyCheckpoint)
    assert (copy.node_id, copy.checkpoint.digest) == ("n2", "digest-of-b")
    (group,) = snapshot(w.core.fleet, {}, w.now)["queues"]
    assert group["reason"] == "its bytes are being copied to n2"
    w.sleep(100.0)
    assert w.ended == {}, "it waits for the copy"
    w.post(happened.CheckpointImported(NodeId("n2"), checkpoint("digest-of-b")))
    w.start_all()
    w.finish("r")
    assert w.ended == {"r": "finished"}


def test_who_waits_for_slots_that_minimums_keep_everywhere_is_told_so_after_a_bound() -> None:
    w = held_by_minimums()
    w.arrive("r1", "b")
    w.sleep(29.0)
    w.cancel("r1")
    w.sleep(10.0)
    w.arrive("r2", "b")
    w.sleep(29.0)
    assert "r2" not in w.ended, "it has a bound of its own"
    w.sleep(2.0)
    assert w.ended["r2"] == "start_timeout"
    assert "minimum replicas of other models hold every slot" in w.errors[RequestId("r2")].message
    w.arrive("r3", "b")
    w.post(happened.ModelAdded(model("a", min_replicas=0, keep_alive_s=1.0)))
    w.sleep(20.0)
    w.start_all()
    w.finish("r3")
    assert w.ended["r3"] == "finished"


def test_a_queue_that_nothing_near_its_bytes_serves_within_its_bound_has_them_copied() -> None:
    """What has the slot is read for longer than b may wait, and nothing else can leave."""
    w = world("a", "b")
    w.add_node(report("n2"))
    w.arrive("r1", "a")
    w.arrive("r2", "b")
    node = w.nodes[NodeId("n1")]
    w.sleep(1.0)
    w.post(happened.NodeReported(node.full_report()))
    assert w.take(do.CopyCheckpoint) == []
    w.sleep(200.0)
    w.post(happened.NodeReported(node.full_report()))
    assert [copy.node_id for copy in w.take(do.CopyCheckpoint)] == ["n2"]


def test_bytes_that_no_connected_node_can_give_are_not_asked_for() -> None:
    w = two_wanted()
    w.disconnect(w.nodes[NodeId("n1")])
    w.add_node(report("n2"))
    assert w.take(do.CopyCheckpoint) == []
    assert "none of 1 connected nodes holds checkpoint" in missing(w)[1]


def test_what_is_partly_there_counts_as_not_there() -> None:
    w = two_wanted()
    w.add_node(report("n2", residency=(Residency(DIGEST, GB, GB // 2, 0),)))
    assert [copy.node_id for copy in w.take(do.CopyCheckpoint)] == ["n2"]


def test_requests_that_only_a_copy_under_way_can_serve_wait_for_it() -> None:
    """The one node with the bytes has too little memory for them: without the copy they could run nowhere."""
    w = World(CoreConfig(start_backoff_s=2.0))
    w.post(happened.ModelAdded(model("a", min_replicas=1)))
    w.add_node(report("small", digests=[DIGEST], dram_pool_bytes=GB // 2))
    w.add_node(report("large"))
    assert [copy.node_id for copy in w.take(do.CopyCheckpoint)] == ["large"]
    w.arrive("r1")
    w.post(happened.NodeReported(w.nodes[NodeId("small")].full_report()))
    assert w.ended == {}
    w.post(happened.CopyFailed(NodeId("large"), DIGEST, LOST))
    assert w.ended == {}, "it is tried again"
    w.sleep(2.1)
    w.post(happened.CheckpointImported(NodeId("large"), checkpoint(DIGEST)))
    w.start_all()
    w.finish("r1")
    assert w.ended == {"r1": "finished"}


def test_requests_that_no_copy_can_serve_are_refused_at_once_and_a_copy_without_end_bounds_their_wait() -> None:
    w = World(CoreConfig(start_timeout_s=50.0))
    w.post(happened.ModelAdded(model("a", min_replicas=1)))
    node = w.add_node(report("small", digests=[DIGEST], dram_pool_bytes=GB // 2))
    w.arrive("r1")
    w.post(happened.NodeReported(node.full_report()))
    assert w.ended == {"r1": "out_of_memory"}
    w.add_node(report("large"))
    w.arrive("r2")
    w.sleep(49.0)
    assert "r2" not in w.ended
    w.sleep(2.0)
    assert w.ended["r2"] == "start_timeout"


def test_the_pause_grows_while_what_arrives_is_refused_and_is_short_again_once_a_replica_has_started_there() -> None:
    w = two_wanted()
    node = w.add_node(report("n2"))
    for pause_s in (2.0, 4.0, 8.0):
        assert len(w.take(do.CopyCheckpoint)) == 1
        w.post(happened.CheckpointImported(NodeId("n2"), checkpoint(DIGEST)))
        w.post(happened.CopyFailed(NodeId("n2"), DIGEST, LOST))
        node.instances.clear()
        w.connect(node)
        w.sleep(pause_s - 0.1)
        assert w.take(do.CopyCheckpoint) == []
        w.sleep(0.2)
    w.post(happened.CheckpointImported(NodeId("n2"), checkpoint(DIGEST)))
    w.start_all()
    assert missing(w) == (0, "")
    w.take(do.CopyCheckpoint)
    w.disconnect(node)
    w.sleep(w.config.node_grace_s + 1.0)
    w.add_node(report("n3"))
    assert len(w.take(do.CopyCheckpoint)) == 1
    w.post(happened.CopyFailed(NodeId("n3"), DIGEST, LOST))
    assert "the next try is in 2 s" in missing(w)[1]

"""Bytes that nobody needs go after a while; bytes that anybody may need never do."""

from nearline.controller import events as happened
from nearline.controller.janitor import Janitor
from nearline.protocol import AdapterSpec, CheckpointKind, ModelId, NodeId
from tests.controller.fleets import World, checkpoint, model, report, world

GRACE_S = 120.0
ORPHAN = (NodeId("n1"), "orphan")


def keeper() -> Janitor:
    janitor = Janitor(GRACE_S)
    janitor.own = {"orphan", "digest-of-a", "digest-of-p"}
    return janitor


def holding(*digests: str, **settings: object) -> World:
    """A fleet of the model `a` and the adapter `p` on it, and a node that holds these digests beside theirs."""
    w = world()
    w.nodes.clear()
    w.post(happened.ModelAdded(model("a")))
    adapter = checkpoint("digest-of-p", kind=CheckpointKind.ADAPTER)
    w.post(happened.AdapterAdded(AdapterSpec(ModelId("p"), ModelId("a"), adapter, 0.0)))
    w.add_node(report("n1", digests=["digest-of-a", "digest-of-p", *digests]))
    return w


def test_what_no_name_needs_goes_after_the_grace_period_and_nothing_else() -> None:
    w, janitor = holding("orphan"), keeper()
    assert janitor.sweep(w.core.fleet, 1000.0) == []
    assert janitor.sweep(w.core.fleet, 1000.0 + GRACE_S - 1) == []
    assert janitor.sweep(w.core.fleet, 1000.0 + GRACE_S) == [ORPHAN]
    assert janitor.sweep(w.core.fleet, 1001.0 + GRACE_S) == [], "a node gets time to obey"
    assert janitor.sweep(w.core.fleet, 1000.0 + 2 * GRACE_S) == [ORPHAN], "and is asked again"


def test_nothing_goes_before_the_registry_is_known_nor_what_another_registry_brought_in() -> None:
    w = holding("orphan", "of another registry")
    unknown = Janitor(GRACE_S)
    assert all(unknown.sweep(w.core.fleet, now) == [] for now in (0.0, GRACE_S, 9 * GRACE_S))
    janitor = keeper()
    janitor.sweep(w.core.fleet, 0.0)
    assert janitor.sweep(w.core.fleet, GRACE_S) == [ORPHAN]


def test_a_registry_without_names_sweeps_what_it_once_had() -> None:
    w = World()
    w.add_node(report("n1", digests=["orphan"]))
    janitor = keeper()
    janitor.sweep(w.core.fleet, 0.0)
    assert janitor.sweep(w.core.fleet, GRACE_S) == [ORPHAN]


def test_a_registration_under_way_keeps_everything_and_the_time_starts_anew() -> None:
    w, janitor = holding("orphan"), keeper()
    janitor.sweep(w.core.fleet, 0.0)
    janitor.num_registering = 1
    assert janitor.sweep(w.core.fleet, GRACE_S) == []
    janitor.num_registering = 0
    assert janitor.sweep(w.core.fleet, GRACE_S + 1) == []
    assert janitor.sweep(w.core.fleet, 2 * GRACE_S + 1) == [ORPHAN]


def test_a_node_that_comes_back_has_its_whole_grace_period() -> None:
    w, janitor = holding("orphan"), keeper()
    janitor.sweep(w.core.fleet, 0.0)
    w.disconnect(w.nodes[NodeId("n1")])
    assert janitor.sweep(w.core.fleet, GRACE_S) == []
    w.connect(w.nodes[NodeId("n1")])
    assert janitor.sweep(w.core.fleet, GRACE_S + 1) == []
    assert janitor.sweep(w.core.fleet, 2 * GRACE_S + 1) == [ORPHAN]


def test_a_version_that_still_drains_and_an_adapter_in_use_stay() -> None:
    w, janitor = holding(), keeper()
    w.arrive("r1", "a", adapter_id=ModelId("p"), adapter_digest="digest-of-p")
    w.start_all()
    w.post(happened.AdapterRemoved(ModelId("p")))
    w.post(happened.ModelAdded(model("a", "digest-two")))
    janitor.sweep(w.core.fleet, 0.0)
    assert janitor.sweep(w.core.fleet, GRACE_S) == []
    w.finish("r1")
    janitor.sweep(w.core.fleet, 2 * GRACE_S)
    found = [digest for _, digest in janitor.sweep(w.core.fleet, 3 * GRACE_S)]
    assert found == ["digest-of-a", "digest-of-p"]

"""Where a model starts: literal fleets, the choice, and why."""

from collections.abc import Collection

from nearline.controller.config import CoreConfig
from nearline.controller.estimate import displaced_s
from nearline.controller.policy.placement import Need, NoPlace, Placement, damage_s, place
from nearline.controller.policy.views import InstanceView
from nearline.controller.state import InstanceRecord, ModelRecord, NodeRecord
from nearline.protocol import DeviceInfo, Digest, InstanceId, InstanceSpec, InstanceState, ModelId, NodeId
from tests.controller.fleets import GB, info, model, report, resident

CONFIG = CoreConfig(stop_s=0.1, swap_drain_s=30.0)
NEED = Need(Digest("d"), 10 * GB)
NOW = 100.0


def node(node_id: str, num_slots: int = 1, dram_bytes: int = 0, ssd: bool = True, **settings: object) -> NodeRecord:
    rows = (resident("d", 10 * GB, dram_bytes),) if ssd else ()
    made = NodeRecord(report(node_id, num_slots, residency=rows, **settings))
    made.apply(made.report)
    return made


def occupy(where: NodeRecord, name: str, idle_s: float | None = 10.0, num_bytes: int = GB) -> InstanceRecord:
    spec = InstanceSpec(InstanceId(name), ModelId(name), Digest(f"d-{name}"))
    made = InstanceRecord(spec, where, ModelRecord(model(name, f"d-{name}", num_bytes)), 0.0, is_acknowledged=True)
    made.state, made.loaded_at, made.max_running = InstanceState.READY, 1.0, 8
    made.idle_since = None if idle_s is None else NOW - idle_s
    if idle_s is None:
        made.in_flight = {info("x").request_id: None}  # type: ignore[dict-item]
    where.instances[made.instance_id] = made
    return made


def decide(
    nodes: list[NodeRecord], need: Need = NEED, may_stop: Collection[str] = (), claimed: Collection[InstanceId] = ()
) -> Placement | NoPlace:
    def allows(instance: InstanceView) -> bool:
        return instance.instance_id in may_stop

    return place(nodes, need, NOW, CONFIG, allows, claimed)


def placed(found: Placement | NoPlace) -> Placement:
    assert isinstance(found, Placement), found
    return found


def test_bytes_in_dram_beat_bytes_on_ssd() -> None:
    found = placed(decide([node("n1"), node("n2", dram_bytes=10 * GB)]))
    assert (found.node_id, found.leaving) == ("n2", ())
    assert abs(found.estimate_s - (10 / 20 + 0.05)) < 1e-9
    assert found.reason == "starts from dram in 0.55 s"


def test_partial_residency_counts() -> None:
    found = placed(decide([node("n1", dram_bytes=4 * GB), node("n2", dram_bytes=5 * GB)]))
    assert found.node_id == "n2"
    assert abs(found.estimate_s - (5 / 20 + 5 / 2 + 0.05)) < 1e-9


def test_a_node_whose_storage_is_busy_loses_to_a_free_one() -> None:
    busy = node("n1")
    busy.storage_free_at = NOW + 4.0
    assert placed(decide([busy, node("n2")])).node_id == "n2"


def test_a_node_without_a_prewarmed_process_pays_for_one() -> None:
    found = placed(decide([node("n1", num_prewarmed=0, process_s=3.0), node("n2")]))
    assert found.node_id == "n2"


def test_equal_nodes_are_taken_in_order_of_their_names() -> None:
    assert placed(decide([node("n2"), node("n1")])).node_id == "n1"


def test_a_full_node_with_the_bytes_in_dram_is_worth_stopping_an_idle_instance_for() -> None:
    warm = node("n1", dram_bytes=10 * GB)
    occupy(warm, "old", idle_s=1000.0)
    found = placed(decide([warm, node("n2")], may_stop=["old"]))
    assert (found.node_id, found.victims) == ("n1", ("old",))
    assert "once old left" in found.reason


def test_of_two_idle_instances_the_one_nobody_will_miss_goes() -> None:
    full = node("n1", num_slots=2)
    recent, forgotten = occupy(full, "recent", idle_s=1.0), occupy(full, "forgotten", idle_s=500.0)
    assert damage_s(recent, NOW) > damage_s(forgotten, NOW)
    assert placed(decide([full], may_stop=["recent", "forgotten"])).victims == ("forgotten",)


def test_an_idle_instance_goes_before_a_busy_one_and_a_draining_one_before_both() -> None:
    full = node("n1", num_slots=3)
    occupy(full, "busy", idle_s=None)
    occupy(full, "idle")
    assert placed(decide([full], may_stop=["busy"])) != placed(decide([node("n2")]))
    occupy(full, "third")
    assert placed(decide([full], may_stop=["busy", "idle"])).victims == ("idle",)
    leaving = occupy(full, "third")
    leaving.is_stopping, leaving.stop_by = True, NOW + 1
    found = placed(decide([full], may_stop=["busy", "idle"]))
    assert (found.leaving, found.victims) == (("third",), ())
    found = placed(decide([full], may_stop=["busy", "idle"], claimed=[InstanceId("third")]))
    assert found.victims == ("idle",), "a more urgent model counts on the draining one"


def test_memory_counts_beside_slots_and_only_what_helps_is_stopped() -> None:
    full = node("n1", num_slots=3, dram_pool_bytes=16 * GB)
    occupy(full, "small", idle_s=900.0, num_bytes=1 * GB)
    occupy(full, "large", idle_s=1.0, num_bytes=8 * GB)
    found = placed(decide([full], may_stop=["small", "large"]))
    assert found.victims == ("large",)
    assert isinstance(decide([full], may_stop=["small"]), NoPlace)


def test_replicas_on_a_cpu_share_the_pool_and_on_a_gpu_they_do_not() -> None:
    for kind, fits in (("cpu", True), ("cuda", False)):
        device = DeviceInfo(0, kind, kind, 24 * GB, 2, weight_bytes=0 if kind == "cpu" else 16 * GB)
        where = node("n1", devices=(device,), dram_pool_bytes=16 * GB)
        twin = occupy(where, "twin", num_bytes=10 * GB)
        twin.spec = InstanceSpec(InstanceId("twin"), ModelId("m"), Digest("d"))
        assert isinstance(decide([where]), Placement) is fits


def test_a_checkpoint_takes_whole_frames_of_the_pool() -> None:
    frame_bytes = 3 * GB
    for pool_bytes, fits in ((12 * GB, True), (12 * GB - 1, False)):
        where = node("n1", num_slots=2, dram_pool_bytes=pool_bytes, dram_frame_bytes=frame_bytes)
        assert isinstance(decide([where]), Placement) is fits, "ten gigabytes take four frames"
    where = node("n1", num_slots=2, dram_pool_bytes=14 * GB, dram_frame_bytes=frame_bytes)
    occupy(where, "other", num_bytes=GB)
    assert isinstance(decide([where]), NoPlace), "and the other one takes a whole frame"


def test_a_gpu_has_room_for_what_is_left_beside_its_caches_whatever_the_pool_holds() -> None:
    for weight_bytes, pool_bytes, fits in ((9, 64, False), (10, 64, True), (64, 9, True), (9, 4, False)):
        device = DeviceInfo(0, "cuda", "H200", 140 * GB, 1, weight_bytes * GB)
        found = decide([node("n1", devices=(device,), dram_pool_bytes=pool_bytes * GB)])
        assert isinstance(found, Placement) is fits
        assert fits or (isinstance(found, NoPlace) and found.is_too_big)


def test_what_the_pool_cannot_hold_is_streamed_to_a_gpu_and_takes_nothing_of_the_pool() -> None:
    device = DeviceInfo(0, "cuda", "H200", 140 * GB, 3, 64 * GB)
    where = node("n1", devices=(device,), dram_pool_bytes=8 * GB, dram_free_bytes=0)
    occupy(where, "other", idle_s=None, num_bytes=8 * GB)
    found = placed(decide([where]))
    assert found.leaving == ()
    assert "from ssd" in found.reason.lower()
    occupy(where, "streamed too", idle_s=None, num_bytes=20 * GB)
    assert placed(decide([where])).leaving == ()
    assert displaced_s(where, Digest("d"), 10 * GB) == 0.0, "nothing has to be read again for it"


def test_nodes_on_which_it_failed_are_avoided_while_there_are_others() -> None:
    need = Need(Digest("d"), GB, avoid=(NodeId("n1"),))
    assert placed(decide([node("n1"), node("n2")], need)).node_id == "n2"
    assert placed(decide([node("n1")], need)).node_id == "n1"


def test_what_cannot_be_is_explained() -> None:
    away = node("n1")
    away.is_connected = False
    assert decide([away]) == NoPlace("no node is connected", is_hopeless=True)
    found = decide([node("n1", ssd=False)])
    assert found == NoPlace("none of 1 connected nodes holds checkpoint d", is_hopeless=True)
    found = decide([node("n1", dram_pool_bytes=9 * GB)])
    assert isinstance(found, NoPlace)
    assert (found.is_hopeless, found.is_too_big) == (True, True)
    assert f"{10 * GB} bytes" in found.reason
    full = node("n1")
    occupy(full, "other")
    found = decide([full])
    assert isinstance(found, NoPlace)
    assert not found.is_hopeless


def test_an_adapter_restricts_the_nodes() -> None:
    both = node("n2")
    both.residency[Digest("lora")] = resident("lora", 1000)
    need = Need(Digest("d"), 10 * GB, adapter_digest=Digest("lora"))
    assert placed(decide([node("n1", dram_bytes=10 * GB), both], need)).node_id == "n2"

"""ControllerCore, one behaviour at a time, in virtual time."""

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.config import CoreConfig
from nearline.protocol import (
    AdapterSpec,
    CheckpointKind,
    ModelId,
    RequestId,
    SloClass,
)
from tests.controller.fleets import (
    GB,
    MAX_RUNNING,
    FakeInstance,
    World,
    checkpoint,
    model,
    report,
    slo,
    world,
)


def only_instance(w: World) -> FakeInstance:
    (instance,) = w.instances()
    return instance


def test_the_first_request_starts_an_instance_and_is_dispatched_when_it_is_ready() -> None:
    w = world("a")
    w.arrive("r1")
    (start,) = w.take(do.EnsureInstance)
    assert (start.spec.model_id, start.node_id, start.spec.device_index) == ("a", "n1", 0)
    assert start.estimate_s == 1 * GB / (2 * GB) + 0.05, "bytes / SSD bandwidth + bind; a process is pre-warmed"
    assert "1 waiting" in start.reason
    assert "ssd" in start.reason
    w.start_all()
    (sent,) = w.take(do.Dispatch)
    assert (sent.request_id, sent.instance_id, sent.attempt) == ("r1", start.spec.instance_id, 1)
    w.token("r1")
    w.finish("r1")
    assert w.ended == {"r1": "finished"}


def test_500_requests_at_a_cold_model_cause_one_load_and_a_bounded_hold() -> None:
    w = world("a", config=CoreConfig(max_held_per_model=400))
    for n in range(500):
        w.arrive(f"r{n:03d}")
    assert len(w.take(do.EnsureInstance)) == 1
    assert list(w.ended.values()) == ["overloaded"] * 100
    assert all(error.retry_after_s and error.retry_after_s >= 1 for error in w.errors.values())
    w.start_all()
    assert [d.request_id for d in w.take(do.Dispatch)] == [f"r{n:03d}" for n in range(MAX_RUNNING + 2)]


def test_a_total_limit_holds_over_all_models() -> None:
    w = world("a", "b", config=CoreConfig(max_held_total=3))
    for n in range(4):
        w.arrive(f"r{n}", "ab"[n % 2])
    assert w.ended == {"r3": "overloaded"}


def test_an_unknown_model_and_an_adapter_of_another_model_are_refused() -> None:
    w = world("a", "b")
    w.post(happened.AdapterAdded(AdapterSpec(ModelId("pirate"), ModelId("b"), checkpoint("d"), 0.0)))
    w.arrive("r1", "missing")
    w.arrive("r2", "a", adapter_id="pirate", adapter_digest="d")
    assert w.ended == {"r1": "model_not_found", "r2": "model_not_found"}


def test_an_idle_instance_stops_after_its_keep_alive_and_not_before() -> None:
    w = world("a", keep_alive_s=60.0)
    w.arrive("r1")
    w.start_all()
    w.sleep(100)
    assert w.take(do.StopInstance) == [], "it is busy"
    w.finish("r1")
    w.sleep(59.9)
    assert w.take(do.StopInstance) == []
    w.sleep(0.2)
    (stop,) = w.take(do.StopInstance)
    assert stop.reason == "idle for 60.0 s"
    assert w.instances() == []


def test_an_instance_of_a_model_with_negative_keep_alive_or_minimum_replicas_stays() -> None:
    w = world("a", keep_alive_s=-1.0)
    w.post(happened.ModelAdded(model("m", digest="digest-of-a", keep_alive_s=1.0, min_replicas=1)))
    w.start_all()
    w.sleep(1e6)
    assert [i.spec.model_id for i in w.instances()] == ["m"], "its minimum started without any request"
    assert w.take(do.StopInstance) == []


def test_an_arrival_in_the_instant_of_the_timeout_keeps_the_instance() -> None:
    w = world("a", keep_alive_s=10.0)
    w.arrive("r1")
    w.start_all()
    w.finish("r1")
    w.now += 10.0
    w.arrive("r2")
    assert w.take(do.StopInstance) == []
    w.finish("r2")
    assert w.ended == {"r1": "finished", "r2": "finished"}


def test_a_slow_load_is_never_interrupted_by_the_keep_alive() -> None:
    w = world("a", keep_alive_s=1.0)
    w.arrive("r1")
    w.sleep(500)
    assert w.take(do.StopInstance) == []
    w.start_all()
    w.finish("r1")
    assert w.ended == {"r1": "finished"}


def test_a_waiting_model_takes_the_slot_of_an_idle_one_and_its_bytes_are_preloaded_meanwhile() -> None:
    w = world("a", "b")
    w.arrive("r1", "a")
    w.sleep(1.0)
    w.start_all()
    w.finish("r1")
    w.sleep(20)
    w.arrive("r2", "b")
    (stop,) = w.take(do.StopInstance)
    assert stop.reason.startswith("b waits: this instance is idle for 20.0 s")
    assert [p.digest for p in w.take(do.Preload)] == ["digest-of-b"]
    w.start_all()
    w.finish("r2", None)
    assert w.ended["r2"] == "finished"


def test_a_long_stream_does_not_starve_another_model_and_is_not_lost() -> None:
    w = world("a", "b")
    w.arrive("long", "a")
    w.sleep(1.0)
    w.start_all()
    w.token("long")
    w.arrive("r2", "b")
    w.sleep(9.9)
    assert w.take(do.StopInstance) == [], "an interactive model waits half its target of 20 s first"
    w.sleep(0.2)
    (stop,) = w.take(do.StopInstance)
    assert stop.drain_s == 30.0
    w.arrive("r3", "a")
    w.drain_ends(only_instance(w))
    assert [i.spec.model_id for i in w.instances()] == ["b"], "the evicted model waits its turn"
    w.start_all()
    w.finish("r2")
    w.sleep(20)
    w.start_all()
    assert [d.request_id for d in w.take(do.Dispatch)] == ["long", "r2", "long", "r3"], "the older one resumes first"
    w.finish("long")
    w.finish("r3")
    assert set(w.ended.values()) == {"finished"}


def test_a_batch_class_waits_longer_before_it_drains_anybody() -> None:
    w = world("a", "b")
    w.arrive("long", "a")
    w.start_all()
    w.arrive("r2", "b", slo=slo(slo_class=SloClass.BATCH_1M))
    w.sleep(29)
    assert w.take(do.StopInstance) == []
    w.sleep(2)
    assert len(w.take(do.StopInstance)) == 1


def test_interleaved_requests_for_three_models_on_one_slot_load_each_model_once() -> None:
    """The order A B A A C A B; served first in, first out it would load seven times."""
    w = world("a", "b", "c")
    for n, name in enumerate("abaacab"):
        w.arrive(f"r{n}", name)
    for _ in range(100):
        w.sleep(0.5)
        w.start_all()
        for name in list(w.running()):
            w.finish(name)
    assert set(w.ended.values()) == {"finished"}
    assert len(w.take(do.EnsureInstance)) == 3


def test_two_models_that_alternate_on_one_slot_swap_at_a_bounded_rate_and_both_are_served() -> None:
    w = world("a", "b")
    for n in range(600):
        w.arrive(f"r{n}", "ab"[n % 2])
        w.sleep(0.1)
        for instance in w.instances():
            record = w.core.fleet.instances[instance.spec.instance_id]
            if w.now - record.created_at >= 0.5:
                w.start(instance)
        for name in list(w.running()):
            w.finish(name)
    num_starts = len(w.take(do.EnsureInstance))
    assert num_starts <= 60 / (5 * 0.5) + 2, "a start of 0.5 s buys four times as much residence"
    assert num_starts >= 10
    waits = [r.queued_at for r in w.core.fleet.requests.values()]
    assert w.now - min(waits, default=w.now) < 10, "nobody waits longer than the bound"


def test_a_cancelled_request_frees_its_place_whether_it_waits_or_runs() -> None:
    w = world("a")
    for n in range(MAX_RUNNING + 4):
        w.arrive(f"r{n}")
    w.cancel("r7")
    w.start_all()
    w.cancel("r0")
    (abort,) = w.take(do.AbortSequence)
    assert abort.request_id == "r0"
    assert [d.request_id for d in w.take(do.Dispatch)] == [f"r{n}" for n in range(7)]


def test_the_first_waiter_giving_up_does_not_stop_the_load_for_the_second() -> None:
    w = world("a")
    w.arrive("r1")
    w.arrive("r2")
    w.cancel("r1")
    assert w.take(do.StopInstance) == []
    w.start_all()
    w.finish("r2")
    assert w.ended["r2"] == "finished"


def test_deadlines_end_waiting_and_running_requests() -> None:
    w = world("a")
    w.arrive("runs", slo=slo(deadline_s=5.0))
    w.arrive("waits", slo=slo(deadline_s=2.0))
    w.sleep(3)
    assert w.ended == {"waits": "deadline_exceeded"}
    w.start_all()
    w.sleep(3)
    assert w.ended["runs"] == "deadline_exceeded"
    assert [a.request_id for a in w.take(do.AbortSequence)] == ["runs"]


def test_a_request_that_no_instance_could_take_in_time_is_told_when_to_come_back() -> None:
    w = world("a", config=CoreConfig(start_timeout_s=100.0))
    w.arrive("r1")
    w.sleep(101)
    assert w.ended == {"r1": "start_timeout"}
    assert w.errors[RequestId("r1")].retry_after_s


def test_a_model_without_a_node_is_held_for_a_while_then_refused() -> None:
    w = World()
    w.post(happened.ModelAdded(model("a")))
    w.arrive("r1")
    w.sleep(29)
    assert w.ended == {}
    w.sleep(2)
    assert w.ended == {"r1": "node_lost"}
    w.arrive("r2")
    w.add_node(report(digests=["digest-of-a"]))
    w.start_all()
    w.finish("r2")
    assert w.ended["r2"] == "finished"


def test_a_checkpoint_larger_than_every_node_is_refused_with_sizes_and_a_cure() -> None:
    w = World()
    w.post(happened.ModelAdded(model("a", num_bytes=100 * GB)))
    w.add_node(report(digests=["digest-of-a"]))
    w.arrive("r1")
    assert w.ended == {"r1": "out_of_memory"}
    assert str(100 * GB) in w.errors[RequestId("r1")].message


def test_a_long_queue_brings_further_replicas_one_at_a_time_up_to_the_maximum() -> None:
    w = world("a", num_slots=4, max_replicas=3)
    for n in range(60):
        w.arrive(f"r{n:02d}")
    assert len(w.instances()) == 1
    for expected in (2, 3, 3):
        w.start_all()
        assert len(w.instances()) == expected
    assert {len(i.sequences) for i in w.instances()} == {MAX_RUNNING + 2}


def test_growth_takes_no_slot_from_another_model() -> None:
    w = world("a", "b", num_slots=2, max_replicas=2)
    w.arrive("b1", "b")
    w.start_all()
    w.finish("b1")
    for n in range(60):
        w.arrive(f"r{n}", "a")
    w.start_all()
    w.sleep(5)
    assert w.take(do.StopInstance) == []


def test_removing_a_model_drains_it_and_then_deletes_its_bytes() -> None:
    w = world("a")
    w.arrive("r1")
    w.start_all()
    w.arrive("r2")
    w.post(happened.ModelRemoved(ModelId("a")))
    w.arrive("r3")
    assert w.ended == {"r3": "model_not_found"}
    w.finish("r1")
    assert w.take(do.DeleteCheckpoint) == []
    w.finish("r2")
    assert w.instances() == []
    assert [d.digest for d in w.take(do.DeleteCheckpoint)] == ["digest-of-a"]
    assert w.core.fleet.models == {}


def test_a_new_checkpoint_under_an_old_name_serves_new_requests_while_the_old_one_drains() -> None:
    w = world("a", num_slots=2)
    w.add_node(report("n2", num_slots=2, digests=["new"]))
    w.arrive("old")
    w.start_all()
    w.post(happened.ModelAdded(model("a", digest="new")))
    w.arrive("fresh")
    w.start_all()
    digests = {name: instance.spec.digest for name, (_, instance) in w.running().items()}
    assert digests == {"old": "digest-of-a", "fresh": "new"}
    w.finish("old")
    assert [i.spec.digest for i in w.instances()] == ["new"]
    assert [d.digest for d in w.take(do.DeleteCheckpoint)] == ["digest-of-a"]


def test_the_bytes_of_an_adapter_outlive_its_name_while_a_request_uses_them() -> None:
    w = world("a")
    w.nodes["n1"].report = report(digests=["digest-of-a", "lora"])
    w.post(happened.NodeReported(w.nodes["n1"].report))
    adapter = checkpoint("lora", 1000, CheckpointKind.ADAPTER)
    w.post(happened.AdapterAdded(AdapterSpec(ModelId("pirate"), ModelId("a"), adapter, 0.0)))
    w.arrive("r1", adapter_id="pirate", adapter_digest="lora")
    w.start_all()
    w.post(happened.AdapterRemoved(ModelId("pirate")))
    assert w.take(do.DeleteCheckpoint) == []
    w.finish("r1")
    assert [d.digest for d in w.take(do.DeleteCheckpoint)] == ["lora"]

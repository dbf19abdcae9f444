"""Foresight in a world of honest agents: preloads, forecasts, spare replicas, devices that are shared badly."""

import pytest

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.config import CoreConfig
from nearline.controller.policy.demand import Sharing
from nearline.protocol import DeviceInfo
from tests.controller.fleets import GB, MAX_RUNNING, World, model, report, resident, world


def serve_all(w: World) -> None:
    w.start_all()
    for name in sorted(w.running()):
        w.token(name)
        w.finish(name)


def test_a_model_called_every_ten_minutes_goes_soon_and_is_there_again_when_it_is_called() -> None:
    w = world("a", keep_alive_s=3600.0, keep_alive_min_s=5.0)
    for n in range(12):
        w.arrive(f"r{n}")
        serve_all(w)
        for _ in range(120):
            w.sleep(5)
            w.start_all()
    stops, starts = w.take(do.StopInstance), w.take(do.EnsureInstance)
    assert len(stops) >= 3, "once learned, it does not sit idle for ten minutes"
    assert sum("a call comes soon" in start.reason for start in starts) >= 3
    serve_all(w)
    w.take(do.EnsureInstance)
    w.arrive("late")
    assert "late" in w.running(), "warm, though it had been stopped in between"
    assert w.take(do.EnsureInstance) == []


def test_without_a_free_slot_a_forecast_only_preloads_and_never_stops_anybody() -> None:
    w = World()
    for name in ("a", "b"):
        least = {"keep_alive_min_s": 5.0} if name == "a" else {}
        w.post(happened.ModelAdded(model(name, keep_alive_s=3600.0, **least)))
    w.add_node(report(residency=(resident("digest-of-a"), resident("digest-of-b"))))
    record = w.core.fleet.current_model("a")  # type: ignore[arg-type]
    assert record is not None
    for _ in range(10):
        record.gaps.note(600.0)
    w.arrive("r", "a")
    serve_all(w)
    w.sleep(10)
    assert w.instances() == [], "its next call is far away"
    w.arrive("x", "b")
    serve_all(w)
    w.actions.clear()
    w.sleep(600)
    assert [p.digest for p in w.take(do.Preload)] == ["digest-of-a"]
    assert [i.spec.model_id for i in w.instances()] == ["b"]
    assert w.take(do.StopInstance) == []


def test_models_that_wait_for_a_slot_are_read_into_dram_meanwhile_one_at_a_time() -> None:
    w = world("a", "b", "c")
    w.arrive("r", "a")
    w.start_all()
    w.token("r")
    w.arrive("s", "b")
    w.arrive("t", "c")
    preloads = w.take(do.Preload)
    assert [p.digest for p in preloads] == ["digest-of-b"], "the link is busy with the first"
    w.sleep(2)
    w.post(happened.NodeReported(next(iter(w.nodes.values())).full_report()))
    assert [p.digest for p in w.take(do.Preload)] == ["digest-of-c"]


def test_what_was_read_ahead_on_a_node_that_is_gone_is_read_on_the_next_one() -> None:
    w = world("a", "b")
    w.arrive("r", "a")
    w.start_all()
    w.token("r")
    w.arrive("s", "b")
    assert [(p.node_id, p.digest) for p in w.take(do.Preload)] == [("n1", "digest-of-b")]
    w.disconnect(next(iter(w.nodes.values())))
    w.sleep(w.config.node_grace_s + 1)
    node = w.add_node(report("n2", digests=["digest-of-a"]))
    w.start_all()
    w.sleep(2)
    node.report = report("n2", digests=["digest-of-a", "digest-of-b"])
    w.post(happened.NodeReported(node.full_report()))
    assert [(p.node_id, p.digest) for p in w.take(do.Preload)] == [("n2", "digest-of-b")]


def replicas(config: CoreConfig, num_slots: int = 1) -> World:
    w = World(config)
    w.post(happened.ModelAdded(model("a", max_replicas=2, keep_alive_s=-1.0)))
    names = ("n1", "n2") if num_slots == 1 else ("n1",)
    for name in names:
        w.add_node(report(name, num_slots, ["digest-of-a"]))
    for n in range(3 * MAX_RUNNING):
        w.arrive(f"r{n}")
    w.start_all()
    w.start_all()
    return w


def test_a_burst_s_replica_goes_within_the_window_although_it_is_never_idle_long_enough() -> None:
    w = replicas(CoreConfig(scale_in_s=30.0))
    assert len(w.instances()) == 2
    for _ in range(4):
        serve_all(w)
    for n in range(100):
        w.arrive(f"s{n}")
        w.sleep(1.0)
        serve_all(w)
        for instance in w.instances():
            w.drain_ends(instance)
    assert len(w.instances()) == 1
    (stop,) = w.take(do.StopInstance)
    assert "1 replicas have been enough for 30 s" in stop.reason
    assert not w.open


def test_a_device_that_two_replicas_share_badly_gets_no_second_one() -> None:
    for gain, expected in ((None, 2), (1.6, 2), (0.9, 1)):
        w = World(CoreConfig())
        w.post(happened.ModelAdded(model("a", max_replicas=2)))
        w.add_node(report("n1", 2, ["digest-of-a"]))
        record = w.core.fleet.current_model("a")  # type: ignore[arg-type]
        assert record is not None
        for _ in range(10 if gain else 0):
            record.sharing.note(0.01, 4, is_shared=False)
            record.sharing.note(2 * 0.01 / (gain or 1.0), 4, is_shared=True)
        for n in range(5 * MAX_RUNNING):
            w.arrive(f"r{n}")
        w.start_all()
        w.start_all()
        assert len(w.instances()) == expected, f"gain {gain}"


def answers(w: World, model_id: str, serial: int, took_s: float, num: int = 10) -> None:
    """One answer after another of `took_s` seconds between its first token and its third and last."""
    for n in range(num):
        name = f"{model_id}-{serial}-{n}"
        w.arrive(name, model_id)
        w.token(name)
        w.sleep(took_s)
        w.finish(name)


def test_what_another_model_takes_of_a_device_is_not_held_against_replicas() -> None:
    w = World(CoreConfig())
    for name in ("a", "b"):
        w.post(happened.ModelAdded(model(name, max_replicas=2)))
    w.add_node(report("n1", 3, ["digest-of-a", "digest-of-b"]))
    record = w.core.fleet.current_model("a")  # type: ignore[arg-type]
    assert record is not None
    w.arrive("first")
    w.start_all()
    w.token("first")
    w.finish("first")
    answers(w, "a", 1, 0.2)
    w.arrive("b-long", "b")
    w.start_all()
    answers(w, "a", 2, 1.0)
    assert record.sharing.gain is None, "five times slower beside a busy neighbour: that is the neighbour's"
    w.token("b-long")
    w.finish("b-long")
    assert not record.sharing.shared


def test_answers_that_two_replicas_give_at_once_on_one_device_are_its_shared_pace() -> None:
    w = World(CoreConfig())
    w.post(happened.ModelAdded(model("a", max_replicas=2)))
    w.add_node(report("n1", 2, ["digest-of-a"]))
    record = w.core.fleet.current_model("a")  # type: ignore[arg-type]
    assert record is not None
    for n in range(5 * MAX_RUNNING):
        w.arrive(f"r{n}")
    w.start_all()
    w.start_all()
    for name in sorted(w.running()):
        w.token(name)
    w.sleep(2.0)
    for name in sorted(w.running())[:4]:
        w.finish(name)
    (row,) = record.sharing.shared.values()
    assert (row.weight, row.mean) == (4.0, pytest.approx(2.0 / 2))
    assert not record.sharing.alone


def test_gain_compares_batches_of_like_size() -> None:
    """Full batches alone, half empty ones beside a replica: what the smaller batch saves is not the device's gift."""
    sharing = Sharing()
    for _ in range(20):
        sharing.note(0.04, 16, is_shared=False)
        sharing.note(0.03, 4, is_shared=True)
    assert sharing.gain is None, "a pooled mean would say 2.7"
    for _ in range(20):
        sharing.note(0.02, 4, is_shared=False)
    assert sharing.gain == pytest.approx(2 * 0.02 / 0.03)


def test_another_device_is_taken_instead() -> None:
    w = World(CoreConfig())
    w.post(happened.ModelAdded(model("a", max_replicas=2)))
    devices = tuple(DeviceInfo(n, "cpu", f"cpu{n}", 64 * GB, 2) for n in range(2))
    w.add_node(report("n1", 2, ["digest-of-a"], devices=devices))
    record = w.core.fleet.current_model("a")  # type: ignore[arg-type]
    assert record is not None
    for is_shared in [False, True] * 10:
        record.sharing.note(0.02 if is_shared else 0.01, 4, is_shared=is_shared)
    for n in range(5 * MAX_RUNNING):
        w.arrive(f"r{n}")
    w.start_all()
    w.start_all()
    assert sorted(i.spec.device_index for i in w.instances()) == [0, 1]

"""Running answers that move: each goes on with its tokens elsewhere, ends once, and is charged once."""

from random import Random

import pytest

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.config import CoreConfig
from nearline.protocol import AdapterSpec, CheckpointKind, Digest, ModelId, RequestId, SloClass, TenantId
from tests.controller.fleets import MAX_RUNNING, FakeInstance, World, checkpoint, model, report

LORA = {"adapter_id": ModelId("lora"), "adapter_digest": Digest("lora")}


def seen(config: CoreConfig | None = None) -> World:
    """Two instances, an adapter on one node only, and twenty answers of 10 s each: their first token after 0.1 s."""
    w = World(config or CoreConfig())
    w.post(happened.ModelAdded(model("a", min_replicas=2, max_replicas=2)))
    lora = checkpoint("lora", 1000, CheckpointKind.ADAPTER)
    w.post(happened.AdapterAdded(AdapterSpec(ModelId("lora"), ModelId("a"), lora, 0.0)))
    w.add_node(report("n1", digests=["digest-of-a", "lora"]))
    w.add_node(report("n2", digests=["digest-of-a"]))
    w.start_all()
    for n in range(20):
        w.arrive(f"w{n}", max_tokens=3)
        w.sleep(0.1)
        w.token(f"w{n}")
        w.sleep(9.9)
        w.finish(f"w{n}")
    return w


def on(w: World, node_id: str) -> FakeInstance:
    (found,) = (i for i in w.instances() if w.node_of(i).report.node_id == node_id)
    return found


def crowded(config: CoreConfig | None = None) -> World:
    """Both instances full of answers, but one place on n2; then comes somebody who can run on n1 only."""
    w = seen(config)
    for n in range(2 * MAX_RUNNING):
        w.arrive(f"r{n}", max_tokens=1000)
        w.sleep(0.1)
        w.token(f"r{n}")
    w.actions.clear()
    w.finish(next(iter(on(w, "n2").sequences)))
    w.arrive("late", **LORA)
    return w


def test_an_answer_goes_on_elsewhere_so_that_who_can_run_only_there_gets_its_place() -> None:
    w = crowded()
    (abort,) = w.take(do.AbortSequence)
    assert "it moves" in abort.reason
    moved = abort.request_id
    assert moved in on(w, "n2").sequences
    assert "late" in on(w, "n1").sequences
    assert len(on(w, "n1").sequences) == MAX_RUNNING, "it runs, it does not wait inside"
    assert w.core.fleet.requests[moved].attempt == 2
    assert w.core.decisions()["migrated"] == 1
    w.sleep(60)
    assert w.take(do.AbortSequence) == [], "nothing goes to and fro"
    w.token(moved)
    w.finish(moved)
    assert w.ended[moved] == "finished"


def test_with_moves_off_everybody_stays() -> None:
    assert crowded(CoreConfig(max_moves=0)).take(do.AbortSequence) == []


def test_updates_of_the_attempt_that_moved_away_change_nothing() -> None:
    w = crowded()
    (abort,) = w.take(do.AbortSequence)
    w.post(happened.FirstToken(abort.request_id, 1))
    w.post(happened.SequenceEnded(abort.request_id, 1, happened.FinishReason.STOP, 7))
    assert abort.request_id in w.core.fleet.requests
    assert not w.core.fleet.requests[abort.request_id].has_token


def test_a_moved_answer_is_charged_once_and_has_held_its_place_in_both_instances() -> None:
    w = crowded()
    (abort,) = w.take(do.AbortSequence)
    record, owner = w.core.fleet.requests[abort.request_id], w.core.fleet.current_model(ModelId("a"))
    assert owner is not None
    counters, before_s = owner.queue.counters(SloClass.INTERACTIVE), owner.service_s
    charged = counters.counter(TenantId("default"))
    ran_s = record.held_s
    assert ran_s == pytest.approx(w.now - record.arrived_at), "from its dispatch to its move"
    expected = record.charged_tokens
    w.sleep(1.0)
    w.token(abort.request_id)
    w.sleep(5.0)
    w.finish(abort.request_id)
    assert owner.service_s - before_s == pytest.approx(0.1 * (ran_s + 6.0 - before_s))
    assert expected is not None
    paid = counters.counter(TenantId("default")) - charged
    assert paid == pytest.approx(2 * (3 - expected)), (
        "the answer's three tokens in place of those expected; no prompt twice"
    )


def test_a_request_whose_instance_is_lost_right_after_its_move_goes_on_once_more() -> None:
    w = crowded()
    (abort,) = w.take(do.AbortSequence)
    target = on(w, "n2")
    target.sequences.clear()
    w.crash(target)
    w.start_all()
    w.sleep(5)
    record = w.core.fleet.requests[RequestId(abort.request_id)]
    assert (record.attempt >= 2, record.num_losses) == (True, 1)


def test_waiting_for_the_bytes_of_a_start_is_not_what_a_resume_takes() -> None:
    w = World(CoreConfig())
    w.post(happened.ModelAdded(model("a")))
    w.add_node(report("n1", digests=["digest-of-a"]))
    w.arrive("cold", max_tokens=3)
    (instance,) = w.instances()
    w.bind(instance)
    assert "cold" in instance.sequences, "it is there before the bytes"
    w.sleep(30.0)
    w.load(instance)
    w.token("cold")
    w.finish("cold")
    for n in range(8):
        w.arrive(f"w{n}", max_tokens=3)
        w.sleep(0.1)
        w.token(f"w{n}")
        w.finish(f"w{n}")
    owner = w.core.fleet.current_model(ModelId("a"))
    assert owner is not None
    assert owner.resume.is_known
    assert owner.resume.seconds(100) == pytest.approx(0.1), "without the 30 s of the start"


def test_whatever_happens_nobody_moves_too_often_and_everybody_ends_once() -> None:
    """Random histories of two nodes; `World.post` checks the fleet's invariants after every event."""
    num_migrated = 0
    for seed in range(12):
        stream, w = Random(seed), seen()
        for n in range(150):
            w.arrive(f"x{n}", max_tokens=1000, **(LORA if stream.random() < 0.4 else {}))
            for name in [name for name in w.running() if stream.random() < 0.5]:
                w.token(name)
            for name in [name for name in w.running() if stream.random() < 0.1]:
                w.finish(name)
            w.sleep(stream.choice((0.05, 0.5, 3.0)))
            assert all(r.num_moves <= 3 for r in w.core.fleet.requests.values())
            if stream.random() < 0.03:
                node = stream.choice(list(w.nodes.values()))
                w.disconnect(node)
                w.connect(node)
        while w.running():
            w.finish(next(iter(w.running())))
        assert not w.open
        num_migrated += w.core.decisions()["migrated"]
    assert num_migrated > 10

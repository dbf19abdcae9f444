"""Answers that move with their tokens, and who leaves a full memory: against whatever loads there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearline.controller.config import CoreConfig
from nearline.controller.estimate import ResumeCost
from nearline.controller.policy.balance import Move
from nearline.controller.policy.migration import Costs, go_on, make_room, relieve
from nearline.controller.queues import RequestRecord
from nearline.controller.state import InstanceRecord, ModelRecord, NodeRecord
from nearline.protocol import Digest, InstanceId, InstanceSpec, InstanceState, RequestId
from tests.controller.fleets import info, model, report, slo

CONFIG = CoreConfig()
NOW, PLACES = 100.0, 4
ADAPTER = Digest("lora")


def costs(base_s: float = 0.05, per_token_s: float = 0.0002) -> Costs:
    """Answers take 20 ms a token; computing tokens again what is said."""
    resume = ResumeCost()
    for tokens in (100, 200, 300, 400) * 4:
        resume.note(tokens, base_s + per_token_s * tokens)
    return Costs(0.02, 10.0, resume)


def request(name: str, order: int, has_token: bool, began_at: float = 98.0, **settings: object) -> RequestRecord:
    made = RequestRecord(info(name, max_tokens=1000, **settings), Digest("d"), order, 0.0, 0.0, 1)
    made.predicted_tokens, made.has_token, made.dispatched_at = 500.0, has_token, began_at
    return made


def instance(name: str, begun: int, waiting: int = 0, holds: bool = True, **settings: object) -> InstanceRecord:
    """`begun` base answers that run for 2 s, and requests of the adapter that wait behind them."""
    node = NodeRecord(report(f"node-of-{name}"))
    node.apply(report(f"node-of-{name}", digests=["lora"] if holds else []))
    spec = InstanceSpec(InstanceId(name), model("a").model_id, Digest("d"))
    made = InstanceRecord(spec, node, ModelRecord(model("a")), 0.0, state=InstanceState.READY, is_acknowledged=True)
    made.max_running = PLACES
    for n in range(begun + waiting):
        lora = {"adapter_id": "lora", "adapter_digest": ADAPTER} if n >= begun else {}
        one = request(f"{name}-{n}", 10 * n, n < begun, **lora, **settings)
        made.in_flight[one.info.request_id], one.instance_id = one, made.instance_id
    return made


def carry_out(made: list[InstanceRecord], move: Move, now: float) -> RequestRecord:
    by_id = {i.instance_id: i for i in made}
    moved = by_id[move.source_id].in_flight.pop(move.request.info.request_id)
    if moved.preempted_at is not None:
        by_id[move.source_id].num_preempted -= 1
    moved.num_kept, moved.has_token, moved.preempted_at, moved.dispatched_at = 100.0, False, None, now
    moved.num_moves, moved.moved_at = moved.num_moves + 1, now
    by_id[move.target_id].in_flight[moved.info.request_id] = moved
    return moved


def num_waiting(made: list[InstanceRecord]) -> int:
    return sum(max(0, len(i.in_flight) - i.num_preempted - i.max_running) for i in made)


def test_an_answer_makes_room_for_who_can_run_only_beside_it() -> None:
    made = [instance("i0", PLACES, waiting=1), instance("i1", 1, holds=False)]
    found = make_room(made, costs(), NOW, CONFIG)
    assert found is not None
    assert (found.source_id, found.target_id) == ("i0", "i1")
    assert found.request.info.adapter_digest is None
    assert make_room(list(reversed(made)), costs(), NOW, CONFIG) == found, "whatever the order"


@pytest.mark.parametrize(
    ("made", "dear", "why"),
    [
        ([instance("i0", PLACES), instance("i1", 0)], 1.0, "nobody waits"),
        ([instance("i0", PLACES, 1), instance("i1", PLACES)], 1.0, "no place is free"),
        ([instance("i0", PLACES, 1, slo=slo(tpot_s=0.1)), instance("i1", 1, holds=False)], 1.0, "a pace is promised"),
        ([instance("i0", PLACES, 1), instance("i1", 1, holds=False)], 60.0, "it costs more than it gains"),
    ],
)
def test_no_answer_makes_room_if(made: list[InstanceRecord], dear: float, why: str) -> None:
    assert make_room(made, costs(0.05 * dear), NOW, CONFIG) is None, why


def test_an_answer_that_is_nearly_over_stays() -> None:
    made = [instance("i0", PLACES, waiting=1), instance("i1", 1, holds=False)]
    for one in made[0].in_flight.values():
        one.predicted_tokens = 105.0  # about 100 of them are there
    assert make_room(made, costs(), NOW, CONFIG) is None


def test_an_instance_takes_one_that_brings_tokens_at_a_time() -> None:
    made = [instance("i0", PLACES, waiting=2), instance("i1", 0, holds=False)]
    first = make_room(made, costs(), NOW, CONFIG)
    assert first is not None
    arrived = carry_out(made, first, NOW)
    assert make_room(made, costs(), NOW, CONFIG) is None
    arrived.has_token = True
    assert make_room(made, costs(), NOW, CONFIG) is not None


LOADS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), min_size=2, max_size=5)


@given(LOADS, st.lists(st.sampled_from((0.1, 11.0)), max_size=20))
def test_every_move_makes_fewer_wait_and_nobody_moves_too_often(
    loads: list[tuple[int, int, bool]], gaps: list[float]
) -> None:
    made = [instance(f"i{n}", begun, waiting, holds) for n, (begun, waiting, holds) in enumerate(loads)]
    everybody = sorted(name for i in made for name in i.in_flight)
    now = NOW
    for gap in gaps:
        before, found = num_waiting(made), make_room(made, costs(), now, CONFIG)
        if found is not None:
            moved = carry_out(made, found, now)
            assert num_waiting(made) == before - 1
            assert moved.num_moves <= CONFIG.max_moves
            assert sorted(name for i in made for name in i.in_flight) == everybody, "each has exactly one owner"
        now += gap
        for one in (r for i in made for r in i.in_flight.values() if r.num_moves):
            one.has_token = True


def preempted(after_s: float, others: int) -> list[InstanceRecord]:
    made = [instance("i0", PLACES + 1), instance("i1", others)]
    one = next(iter(made[0].in_flight.values()))
    one.preempted_at, made[0].num_preempted = NOW - after_s, 1
    return made


def test_a_preempted_answer_goes_on_where_a_place_is_free() -> None:
    found = go_on(preempted(1.0, 2), costs(), NOW, CONFIG)
    assert found is not None
    assert (found.request.info.request_id, found.target_id) == ("i0-0", "i1")
    assert go_on(preempted(1.0, PLACES), costs(), NOW, CONFIG) is None, "no place is free"
    assert go_on(preempted(0.01, 2), costs(), NOW, CONFIG) is None, "sooner than its tokens could be computed again"


def memories(first: int, second: int, waited_s: float = 5.0) -> list[InstanceRecord]:
    """Two instances of 1,000 tokens that were sent prompts of 100; the last to come to the first waits."""
    made = [instance("i0", first - 1), instance("i1", second)]
    for one in made:
        one.max_running, one.kv_tokens_total = 48, 1000
        for each in one.in_flight.values():
            each.dispatched_at = NOW
    late = request("late", 1000, False, NOW - waited_s)
    made[0].in_flight[late.info.request_id] = late
    return made


def test_who_waits_in_a_full_memory_moves_to_where_it_suffices() -> None:
    found = relieve(memories(10, 3), costs(), NOW, CONFIG)
    assert found is not None
    assert (found.request.info.request_id, found.source_id, found.target_id) == ("late", "i0", "i1")
    assert relieve(memories(9, 3), costs(), NOW, CONFIG) is None, "the memory suffices"
    assert relieve(memories(10, 8), costs(), NOW, CONFIG) is None, "the other's would not"
    assert relieve(memories(10, 3, 0.1), costs(), NOW, CONFIG) is None, "its prompt may be under way"
    unknown = memories(10, 3)
    for one in unknown:
        one.kv_tokens_total = 0
    assert relieve(unknown, costs(), NOW, CONFIG) is None, "nobody knows the memory"


def test_who_waits_in_a_full_memory_with_tokens_goes_where_nobody_else_resumes() -> None:
    made = memories(10, 3)
    made[0].in_flight[RequestId("late")].num_kept = 50.0
    other = next(iter(made[1].in_flight.values()))
    other.num_kept, other.has_token = 50.0, False
    assert relieve(made, costs(), NOW, CONFIG) is None
    other.has_token = True
    found = relieve(made, costs(), NOW, CONFIG)
    assert found is not None
    assert found.request.info.request_id == "late"

"""Moves between instances against whatever loads there are; the control moves at random and goes to and fro."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from nearline.controller.config import CoreConfig
from nearline.controller.policy.balance import move
from nearline.controller.queues import RequestRecord
from nearline.controller.state import InstanceRecord, ModelRecord, NodeRecord
from nearline.protocol import Digest, InstanceId, InstanceSpec, InstanceState
from tests.controller.fleets import info, model, report

CONFIG = CoreConfig()
LOADS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=5)


def instances(loads: list[tuple[int, int, int]]) -> list[InstanceRecord]:
    """One instance per (requests, places, of them with a token)."""
    owner, node, made = ModelRecord(model("a")), NodeRecord(report()), []
    for n, (held, places, begun) in enumerate(loads):
        spec = InstanceSpec(InstanceId(f"i{n}"), owner.spec.model_id, Digest("d"))
        instance = InstanceRecord(spec, node, owner, 0.0, state=InstanceState.READY, is_acknowledged=True)
        instance.max_running = places
        for k in range(held):
            request = RequestRecord(info(f"{n}-{k}"), Digest("d"), 10 * n + k, 0.0, 0.0, 1, instance.instance_id)
            request.has_token = k < begun
            instance.in_flight[request.info.request_id] = request
        made.append(instance)
    return made


def imbalance(made: list[InstanceRecord]) -> int:
    """Requests that wait inside instances."""
    return sum(max(0, len(i.in_flight) - i.max_running) for i in made)


def carry_out(made: list[InstanceRecord], request_id: object, source_id: object, target_id: object) -> None:
    by_id: dict[object, InstanceRecord] = {i.instance_id: i for i in made}
    request = by_id[source_id].in_flight.pop(request_id)  # type: ignore[call-overload]
    request.num_moves, request.moved_at = request.num_moves + 1, 0.0
    by_id[target_id].in_flight[request_id] = request  # type: ignore[index]


@given(LOADS)
def test_every_move_makes_fewer_wait_moves_no_token_and_nothing_twice_and_they_end(
    loads: list[tuple[int, int, int]],
) -> None:
    made = instances(loads)
    everything = sorted(name for i in made for name in i.in_flight)
    moved: list[object] = []
    while (found := move(made, 0.0, CONFIG)) is not None:
        before = imbalance(made)
        assert not found.request.has_token
        assert found.request.info.request_id not in moved
        moved.append(found.request.info.request_id)
        carry_out(made, found.request.info.request_id, found.source_id, found.target_id)
        assert imbalance(made) == before - 1
        assert sorted(name for i in made for name in i.in_flight) == everything, "each has exactly one owner"
    free = [i for i in made if len(i.in_flight) < i.max_running]
    waiting = [i for i in made if len(i.in_flight) > i.max_running]
    stuck = [r for i in waiting for r in i.in_flight.values() if not (r.has_token or r.num_moves)]
    assert not (free and stuck), "no place stands free while somebody who may move waits"


def test_an_instance_takes_one_that_brings_tokens_at_a_time_and_any_without() -> None:
    made = instances([(3, 1, 1), (1, 4, 0)])
    resuming = next(iter(made[1].in_flight.values()))
    resuming.num_kept = 100.0
    plain, lost = list(made[0].in_flight.values())[1:]
    lost.num_kept = 50.0
    found = move(made, 0.0, CONFIG)
    assert found is not None
    assert found.request is plain, "the last to come would go, but brings tokens"
    resuming.has_token = True
    found = move(made, 0.0, CONFIG)
    assert found is not None
    assert found.request is lost


def test_moving_at_random_makes_more_wait_sooner_or_later() -> None:
    stream, worse = Random(2), 0
    for _ in range(50):
        made = instances([(stream.randint(0, 6), 4, 0) for _ in range(3)])
        before = imbalance(made)
        source, target = stream.sample(made, 2)
        if source.in_flight:
            carry_out(made, next(iter(source.in_flight)), source.instance_id, target.instance_id)
            worse += imbalance(made) > before
    assert worse > 5

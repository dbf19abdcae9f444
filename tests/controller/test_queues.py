"""Groups and queues: order, places, and returning requests."""

from hypothesis import given
from hypothesis import strategies as st

from nearline.controller.queues import RequestRecord, VirtualQueue
from nearline.protocol import Digest, SloClass
from tests.controller.fleets import info, slo


def record(order: int, kind: SloClass = SloClass.INTERACTIVE, adapter: str | None = None) -> RequestRecord:
    made = info(f"r{order}", slo=slo(slo_class=kind), adapter_digest=adapter)
    return RequestRecord(made, Digest("d"), order, float(order), float(order))


def names(queue: VirtualQueue) -> list[list[str]]:
    return [list(group.waiting) for group in queue.ordered_groups()]


def test_a_drained_group_that_refills_is_found_again_in_its_old_place() -> None:
    queue = VirtualQueue()
    first, second = record(1, adapter="x"), record(2, adapter="y")
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    assert names(queue) == [["r2"]]
    late = RequestRecord(info("late", adapter_digest="x"), Digest("d"), 3, 2.0, 2.0)
    queue.push(late)
    assert names(queue) == [["late"], ["r2"]], "due at the same instant: the older group first"


def test_groups_are_ordered_by_when_their_heads_are_due() -> None:
    queue = VirtualQueue()
    queue.push(record(1, SloClass.BATCH_1H))
    queue.push(record(2, SloClass.BATCH_1M))
    queue.push(record(3))
    assert names(queue) == [["r3"], ["r2"], ["r1"]]
    queue.push(RequestRecord(info("old", slo=slo(ttft_s=0.5)), Digest("d"), 4, 4.0, 4.0))
    assert names(queue)[0] == ["r3", "old"], "same class, same group"
    assert queue.shortest_target_s() == 20.0


def test_a_queue_that_aged_is_more_urgent_than_a_fresh_one_of_a_stricter_class() -> None:
    queue = VirtualQueue()
    queue.push(RequestRecord(info("aged", slo=slo(slo_class=SloClass.BATCH_1M)), Digest("d"), 1, 0.0, 0.0))
    queue.push(RequestRecord(info("fresh"), Digest("d"), 2, 50.0, 50.0))
    assert names(queue) == [["aged"], ["fresh"]]


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([None, "x", "y"]), st.booleans()), max_size=60))
def test_any_order_of_pushes_and_removals_keeps_groups_first_in_first_out(
    steps: list[tuple[int, str | None, bool]],
) -> None:
    queue, held = VirtualQueue(), {}
    for order, adapter, is_push in steps:
        if is_push and order not in held:
            held[order] = record(order, adapter=adapter)
            queue.push(held[order])
        elif not is_push and order in held:
            queue.remove(held.pop(order))
        assert queue.num_waiting == len(held)
        assert [request.order for request in queue.requests()] == sorted(held)
        for group in queue.ordered_groups():
            orders = [request.order for request in group.waiting.values()]
            assert orders == sorted(o for o, r in held.items() if r.info.adapter_digest == group.key.adapter_digest)

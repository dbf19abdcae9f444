"""Groups and queues: order, places, and returning requests."""

from hypothesis import given
from hypothesis import strategies as st

from nearline.controller.queues import RequestRecord, VirtualQueue
from nearline.protocol import Digest, SloClass, TenantId
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


class Forgetful(VirtualQueue):
    """Control, as in the public artifact: a drained group leaves the order for ever, but stays on the books."""

    def push(self, request: RequestRecord) -> None:
        was_drained = request.group_key in self.groups and request.group_key not in self.busy_groups
        super().push(request)
        if was_drained:
            del self.busy_groups[request.group_key]


def served(queue: VirtualQueue, steps: list[tuple[SloClass, str | None, bool]]) -> tuple[int, int]:
    """Push and serve in any order, then serve what is left: how many came, how many were served."""
    num_pushed, done = 0, 0
    for kind, adapter, is_push in steps:
        if is_push:
            queue.push(record(num_pushed, kind, adapter))
            num_pushed += 1
        elif queue.busy_groups:
            queue.remove(next(iter(queue.candidates(0.0))))
            done += 1
    while queue.busy_groups:
        queue.remove(next(iter(queue.candidates(0.0))))
        done += 1
    return num_pushed, done


STEPS = st.lists(
    st.tuples(st.sampled_from(list(SloClass)), st.sampled_from([None, "x"]), st.booleans()), min_size=1, max_size=50
)


@given(STEPS)
def test_whatever_drains_and_refills_everybody_is_served(steps: list[tuple[SloClass, str | None, bool]]) -> None:
    num_pushed, done = served(VirtualQueue(), steps)
    assert done == num_pushed


def test_a_queue_that_forgets_drained_groups_loses_whoever_refills_them() -> None:
    push, serve = (SloClass.INTERACTIVE, None, True), (SloClass.INTERACTIVE, None, False)
    queue = Forgetful()
    queue.push(record(0))
    queue.remove(record(0))
    queue.push(record(1))
    assert not queue.busy_groups
    assert queue.num_waiting == 1
    assert served(VirtualQueue(), [push, serve, push, serve]) == (2, 2)


def of_tenant(order: int, tenant: str, bucket: int = 0) -> RequestRecord:
    made = RequestRecord(info(f"r{order}", tenant=TenantId(tenant)), Digest("d"), order, float(order), float(order))
    made.length_bucket = bucket
    made.predicted_tokens = 10.0
    return made


def first(queue: VirtualQueue, now: float = 0.0) -> str:
    return next(iter(queue.candidates(now))).info.request_id


def test_a_length_bucket_that_drained_and_refills_is_served_from_its_old_place() -> None:
    queue = VirtualQueue()
    short, long = of_tenant(1, "t", 0), of_tenant(2, "t", 5)
    queue.push(short)
    queue.push(long)
    queue.remove(short)
    assert first(queue) == "r2"
    queue.push(of_tenant(3, "t", 0))
    assert first(queue) == "r3", "the shorter bucket is found again"
    assert [group.place for group in queue.ordered_groups()] == [1, 0], "by what is due; places are kept"
    assert first(queue, now=15.0) == "r2", "having waited half its target, only older ones go before it"


def test_tenants_take_turns_however_much_one_of_them_sends() -> None:
    queue = VirtualQueue()
    for order in range(20):
        queue.push(of_tenant(order, "flood"))
    for order in range(20, 24):
        queue.push(of_tenant(order, "light"))
    served = []
    for _ in range(8):
        request = next(iter(queue.candidates(0.0)))
        queue.remove(request)
        queue.charge(request)
        served.append(request.info.tenant)
    assert served == ["flood", "light"] * 4


def test_a_request_is_charged_once_and_in_the_end_for_what_it_generated() -> None:
    queue = VirtualQueue()
    request = of_tenant(1, "t")
    counters = queue.counters(SloClass.INTERACTIVE)
    for _ in range(3):  # dispatched, lost, dispatched again
        queue.push(request)
        queue.remove(request)
        queue.charge(request)
        assert counters.counter(TenantId("t")) == 100 + 2 * 10.0
    queue.settle(request, 33)
    queue.settle(request, 33)
    assert counters.counter(TenantId("t")) == 100 + 2 * 33

"""Who is late lets others be in time: the most that can be, and for a bounded while."""

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearline.controller.policy import lateness
from nearline.controller.queues import RequestRecord, VirtualQueue
from nearline.protocol import Digest, Seconds, SloClass
from tests.controller.fleets import info, slo

TARGET_S, SERVICE_S = 20.0, 1.0


def request(order: int, arrived_at: Seconds, kind: SloClass = SloClass.INTERACTIVE) -> RequestRecord:
    return RequestRecord(info(f"r{order}", slo=slo(slo_class=kind)), Digest("d"), order, arrived_at, arrived_at)


def served(
    requests: Sequence[RequestRecord], service_s: Seconds = SERVICE_S, begin: Seconds = 0.0, *, is_aside: bool = True
) -> list[tuple[RequestRecord, Seconds]]:
    """One place: who was served and when it ended, in that order."""
    queue, coming, now, done = VirtualQueue(), list(requests), begin, []
    while coming or queue.num_waiting:
        while coming and coming[0].arrived_at <= now:
            queue.push(coming.pop(0))
        if not queue.num_waiting:
            now = coming[0].arrived_at
            continue
        if is_aside and queue.late_from < now:
            queue.set_aside(service_s, now)
        chosen = next(iter(queue.candidates(now)))
        queue.remove(chosen)
        now += service_s
        done.append((chosen, now))
    assert len(done) == len(requests)
    return done


def num_in_time(done: Sequence[tuple[RequestRecord, Seconds]]) -> int:
    return sum(at <= each.due_at for each, at in done)


@given(st.lists(st.floats(0.0, 39.0), min_size=1, max_size=6), st.floats(1.0, 9.0))
def test_as_many_are_in_time_as_any_order_allows(arrivals: list[float], service_s: float) -> None:
    def make() -> list[RequestRecord]:
        return [request(n, at) for n, at in enumerate(sorted(arrivals))]

    ends = [40.0 + service_s * (n + 1) for n in range(len(arrivals))]
    best = max(num_in_time(list(zip(order, ends, strict=True))) for order in permutations(make()))
    # strict comparison, so that sums of floats in two orders cannot disagree about an instant
    assert num_in_time(served(make(), service_s, 40.0)) >= best or any(
        abs(each.due_at - end) < 1e-6 for each in make() for end in ends
    )


def overload(num: int = 300, part: float = 1.2) -> list[RequestRecord]:
    return [request(n, n * SERVICE_S / part) for n in range(num)]


def test_in_an_overload_due_dates_alone_make_nearly_all_late_and_setting_aside_does_not() -> None:
    ours, control = num_in_time(served(overload())), num_in_time(served(overload(), is_aside=False))
    assert control < 140, "the control: once late, all after it are late too"
    assert ours > 190
    assert ours > 1.4 * control


def longest_wait_s() -> Seconds:
    """A burst, then for ten minutes exactly as much as one place serves: the backlog never shrinks."""
    burst = [request(n, 0.0) for n in range(40)]
    return max(at - each.arrived_at for each, at in served([*burst, *(request(40 + n, float(n)) for n in range(600))]))


def test_nobody_is_put_off_beyond_the_second_date_and_what_is_due_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bound_s = lateness.SECOND_TARGETS * TARGET_S + 40 * SERVICE_S
    assert longest_wait_s() <= bound_s
    monkeypatch.setattr("nearline.controller.queues.SECOND_TARGETS", 1e6)
    assert longest_wait_s() > 400, "the control: without a second date they wait for a gap that never comes"


@given(
    st.lists(st.tuples(st.floats(0.0, 100.0), st.sampled_from(list(SloClass)), st.booleans()), max_size=30),
    st.floats(0.0, 200.0),
    st.floats(0.0, 100.0),
)
def test_setting_aside_moves_exactly_those_who_are_too_late_and_loses_nobody(
    rows: list[tuple[float, SloClass, bool]], now: float, lead_s: float
) -> None:
    queue, made = VirtualQueue(), []
    for order, (at, kind, has_begun) in enumerate(sorted(rows)):
        made.append(request(order, at, kind))
        made[-1].first_token_at = None if has_begun is False else at
        queue.push(made[-1])
    queue.set_aside(lead_s, now)
    assert queue.requests() == made
    for each in made:
        is_hopeless = now > each.due_at - min(lead_s, 0.5 * each.target_s)
        assert each.is_late == (is_hopeless and each.first_token_at is None)
        assert each.group_key.is_late == each.is_late
    left = [each.due_at - 0.5 * each.target_s for each in made if not each.is_late and each.first_token_at is None]
    assert queue.late_from == min(left, default=float("inf"))
    for group in queue.ordered_groups():
        orders = [each.order for each in group.waiting.values()]
        assert orders == sorted(orders)
    for each in made:
        queue.remove(each)
    assert queue.num_waiting == 0


def test_hopeless_requests_behind_one_that_lost_its_instance_let_go_first_who_can_be_in_time() -> None:
    queue = VirtualQueue()
    lost, hopeless, fresh = request(1, 0.0), request(2, 1.0), request(3, 25.0)
    lost.first_token_at = 2.0
    fresh.length_bucket, fresh.predicted_tokens = 5, 100.0
    for each in (lost, hopeless, fresh):
        queue.push(each)
    queue.set_aside(SERVICE_S, 26.0)
    assert [each.is_late for each in (lost, hopeless, fresh)] == [False, True, False]
    queue.remove(lost)
    assert next(iter(queue.candidates(26.0))) is fresh


def test_a_late_interactive_request_goes_behind_a_fresh_one_and_before_one_with_an_hour_left() -> None:
    queue = VirtualQueue()
    late, patient, fresh = request(1, 0.0), request(2, 0.0, SloClass.BATCH_1H), request(3, 25.0)
    for each in (late, patient, fresh):
        queue.push(each)
    queue.set_aside(SERVICE_S, 26.0)
    assert [each.info.request_id for each in queue.candidates(26.0)] == ["r3", "r1", "r2"]

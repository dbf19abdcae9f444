"""Virtual token counters: tables, and the theorem's bound on true counters, which FCFS and no-lift controls break."""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearline.controller.policy.fairness import VirtualCounters, spread_bound
from nearline.protocol import TenantId

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")
POOL, MAX_INPUT, MAX_OUTPUT = 64, 16, 16
BOUND = spread_bound(MAX_INPUT, POOL)


class NoLift(VirtualCounters):
    """Control: least counter first, as a tenant left it."""

    def enter(self, tenant: TenantId) -> None:
        before = self.counter(tenant)
        super().enter(tenant)
        self._counters[tenant] = before


class Fcfs(VirtualCounters):
    """Control: keeps the same books and never looks at them."""


Job = tuple[TenantId, int, int]


class Books(Protocol):
    def __call__(self) -> VirtualCounters: ...


@dataclass
class Engine:
    """A pool of KV tokens, one output token per running sequence and step, and the tenants' queues before it."""

    counters: VirtualCounters
    waiting: dict[TenantId, deque[tuple[int, Job]]] = field(default_factory=dict)
    running: list[list[int | TenantId]] = field(default_factory=list)
    num_arrived: int = 0
    worst: float = 0.0
    served: dict[TenantId, int] = field(default_factory=dict)
    admitted: list[TenantId] = field(default_factory=list)
    ledger: dict[TenantId, int] = field(default_factory=dict)
    """Weighted tokens that really were served so far: a prompt when it begins, each output token as it comes."""

    def arrive(self, job: Job) -> None:
        self.num_arrived += 1
        self.counters.enter(job[0])
        self.waiting.setdefault(job[0], deque()).append((self.num_arrived, job))
        self._look()

    def step(self) -> None:
        while self._admit():
            pass
        for sequence in self.running:
            self.counters.charge(sequence[0], 0, 1)  # type: ignore[arg-type]
            self._book(sequence[0], 2)  # type: ignore[arg-type]
            sequence[2] -= 1  # type: ignore[operator]
        self.running = [sequence for sequence in self.running if sequence[2] > 0]  # type: ignore[operator]
        self._look()

    def _admit(self) -> bool:
        tenants = [tenant for tenant, line in self.waiting.items() if line]
        if not tenants:
            return False
        if isinstance(self.counters, Fcfs):
            tenant = min(tenants, key=lambda t: self.waiting[t][0][0])
        else:
            tenant = self.counters.order(tenants)[0]
        _, (_, num_input, num_output) = self.waiting[tenant][0]
        used = sum(sequence[1] for sequence in self.running)  # type: ignore[misc]
        if used + num_input + num_output > POOL:
            return False
        self.waiting[tenant].popleft()
        self.counters.leave(tenant)
        self.counters.charge(tenant, num_input, 0)
        self.running.append([tenant, num_input + num_output, num_output])
        self.admitted.append(tenant)
        self._book(tenant, num_input)
        self.served[tenant] = self.served.get(tenant, 0) + num_input + 2 * num_output
        self._look()
        return True

    def _book(self, tenant: TenantId, service: int) -> None:
        self.ledger[tenant] = self.ledger.get(tenant, 0) + service

    def _look(self) -> None:
        self.worst = max(self.worst, self.counters.spread())


def flood(make: Books) -> Engine:
    """One tenant asks little, another sends a hundred requests at once."""
    engine = Engine(make())
    for _ in range(100):
        engine.arrive((A, 8, 8))
    for _ in range(60):
        engine.arrive((B, 8, 8))
        engine.step()
    return engine


def comeback(make: Books) -> Engine:
    """A tenant comes back after a long idleness while another has been served alone."""
    engine = Engine(make())
    for _ in range(60):
        engine.arrive((A, 8, 8))
    for _ in range(90):
        engine.step()
    for _ in range(40):
        engine.arrive((B, 8, 8))
    for _ in range(60):
        engine.step()
    return engine


def test_counters_stay_within_the_bound_under_a_flood_and_after_idleness() -> None:
    assert flood(VirtualCounters).worst <= BOUND
    assert comeback(VirtualCounters).worst <= BOUND


def test_first_come_first_served_fails_the_same_check_under_a_flood() -> None:
    assert flood(Fcfs).worst > 2 * BOUND


def test_least_counter_first_without_lift_fails_the_same_check_after_idleness() -> None:
    assert comeback(NoLift).worst > 2 * BOUND


JOBS = st.tuples(st.sampled_from([A, B, C]), st.integers(1, MAX_INPUT), st.integers(1, MAX_OUTPUT))
STEPS = st.lists(st.tuples(st.lists(JOBS, max_size=8), st.integers(1, 12)), max_size=25)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_whatever_arrives_the_spread_of_those_who_wait_never_passes_the_bound(
    steps: list[tuple[list[Job], int]],
) -> None:
    engine = Engine(VirtualCounters())
    for jobs, num_steps in steps:
        for job in jobs:
            engine.arrive(job)
        for _ in range(num_steps):
            engine.step()
    assert engine.worst <= BOUND


def largest_lead(make: Books, jobs: list[tuple[tuple[int, int], tuple[int, int]]]) -> float:
    """Two tenants that always wait: over all intervals, how much more one of them was served than the other."""
    engine, leads = Engine(make()), [0]
    for of_a, of_b in jobs:
        engine.arrive((A, *of_a))
        engine.arrive((B, *of_b))
    while all(engine.waiting[tenant] for tenant in (A, B)):
        engine.step()
        leads.append(engine.ledger.get(A, 0) - engine.ledger.get(B, 0))
    return max(leads) - min(leads)


SIZES = st.tuples(st.integers(1, MAX_INPUT), st.integers(1, MAX_OUTPUT))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SIZES, SIZES), min_size=30, max_size=60))
def test_two_tenants_that_always_wait_are_served_alike_over_every_interval(
    jobs: list[tuple[tuple[int, int], tuple[int, int]]],
) -> None:
    assert largest_lead(VirtualCounters, jobs) <= 2 * BOUND


def test_first_come_first_served_gives_whoever_asks_for_more_more() -> None:
    assert largest_lead(Fcfs, [((MAX_INPUT, MAX_OUTPUT), (1, 1))] * 60) > 2 * BOUND
    assert largest_lead(VirtualCounters, [((MAX_INPUT, MAX_OUTPUT), (1, 1))] * 60) <= 2 * BOUND


def test_tenants_that_ask_alike_are_served_as_they_come() -> None:
    engine, first_come = Engine(VirtualCounters()), Engine(Fcfs())
    for each in (engine, first_come):
        for _ in range(60):
            each.arrive((A, 8, 8))
            each.arrive((B, 8, 8))
        for _ in range(400):
            each.step()
    pairs = [sorted(engine.admitted[n : n + 2]) for n in range(0, len(engine.admitted), 2)]
    assert len(engine.admitted) == len(first_come.admitted) == 120
    assert all(pair == [A, B] for pair in pairs)
    assert set(first_come.admitted[::2]) == {A}


def steps_until_begun(make: Books, num_flood: int) -> int:
    """How long the one request of a tenant that asks little waits behind a flood."""
    engine = Engine(make())
    for _ in range(num_flood):
        engine.arrive((A, 8, 8))
    for _ in range(20):
        engine.step()
    engine.arrive((B, 8, 8))
    for waited in range(10_000):
        if B in engine.admitted:
            return waited
        engine.step()
    raise AssertionError("it never began")


def test_a_flood_does_not_touch_the_wait_of_a_tenant_that_asks_little_and_first_come_first_served_does() -> None:
    light = steps_until_begun(VirtualCounters, 50)
    assert light == steps_until_begun(VirtualCounters, 500) <= MAX_OUTPUT, "until a place comes free, however many wait"
    assert steps_until_begun(Fcfs, 500) > 5 * steps_until_begun(Fcfs, 100) > 10 * light


class Foreknown(VirtualCounters):
    """Charges an answer when its request begins, as far as it is known: `factor` of its tokens, which are 12 here."""

    factor = 1.0

    def charge(self, tenant: TenantId, num_input_tokens: float, num_output_tokens: float) -> None:
        if num_input_tokens:
            super().charge(tenant, num_input_tokens, self.factor * 12)
        elif self.factor != 1.0:
            super().charge(tenant, 0, num_output_tokens * (1.0 - self.factor))


class HalfKnown(Foreknown):
    factor = 0.5


@pytest.mark.parametrize("seed", range(5))
def test_the_better_answers_are_foreknown_the_smaller_the_lead_of_anybody(seed: int) -> None:
    stream = Random(seed)
    jobs = [((stream.randint(1, 16), 12), (stream.randint(1, 16), 12)) for _ in range(100)]
    plain, half, known = (largest_lead(make, jobs) for make in (VirtualCounters, HalfKnown, Foreknown))
    assert known < half < plain


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 9)), max_size=60))
def test_no_arrival_ever_lowers_a_counter(moves: list[tuple[TenantId, int]]) -> None:
    counters, waiting = VirtualCounters(), {A: 0, B: 0, C: 0}
    for tenant, action in moves:
        before = {t: counters.counter(t) for t in waiting}
        if action < 5:
            counters.enter(tenant)
            waiting[tenant] += 1
        elif waiting[tenant]:
            counters.leave(tenant)
            counters.charge(tenant, action, action)
            waiting[tenant] -= 1
        assert all(counters.counter(t) >= before[t] for t in waiting)


def test_a_tenant_that_arrives_while_others_wait_is_lifted_to_the_least_of_them() -> None:
    counters = VirtualCounters()
    counters.enter(A)
    counters.enter(B)
    counters.charge(A, 100, 0)
    counters.charge(B, 70, 0)
    counters.enter(C)
    assert counters.counter(C) == 70
    assert counters.order([A, B, C]) == [B, C, A]


def test_a_tenant_that_arrives_while_nobody_waits_is_lifted_to_the_one_that_left_last() -> None:
    counters = VirtualCounters()
    counters.enter(A)
    counters.charge(A, 10, 20)
    counters.leave(A)
    counters.enter(B)
    assert counters.counter(B) == 10 + 2 * 20


@pytest.mark.parametrize("weights", [{A: 1.0, B: 2.0, C: 3.0}, {A: 1.0, B: 1.0, C: 4.0}])
def test_tenants_that_always_wait_are_served_in_the_ratio_of_their_weights(weights: dict[TenantId, float]) -> None:
    """Equal demand, unequal weights: first come, first served would serve all the same."""
    engine = Engine(VirtualCounters(weights))
    for _ in range(600):
        for tenant in (A, B, C):
            engine.arrive((tenant, 8, 8))
        engine.step()
    base = engine.served[A]
    for tenant in (B, C):
        assert engine.served[tenant] / base == pytest.approx(weights[tenant], rel=0.08)

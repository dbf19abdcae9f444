"""Cores that slots share: processor sharing, by arithmetic and by queueing theory."""

import heapq
from collections.abc import Callable
from random import Random
from statistics import fmean
from typing import Any

import pytest

from nearline.controller import ControllerCore, CoreConfig
from nearline.protocol import ModelId
from nearline.simulator import Arrival, CostModel, Machine, Outcome, SimulatedModel, Simulation, add_models, make_fleet
from nearline.simulator import stepped as steps_engine
from nearline.simulator.cores import SharedCores

GB = 10**9


def ends_of(works: list[tuple[float, float]], slowdown: float) -> list[float]:
    """When works of (begins, seconds alone) are done."""
    heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
    ends, now, order = [0.0] * len(works), 0.0, 0

    def schedule(delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        nonlocal order
        order += 1
        heapq.heappush(heap, (now + delay_s, order, what, arguments))

    def done(index: int) -> None:
        ends[index] = now

    cores = SharedCores(slowdown, lambda: now, schedule)
    for index, (begins_at, seconds) in enumerate(works):
        schedule(begins_at, cores.compute, seconds, done, index)
    while heap:
        now, _, what, arguments = heapq.heappop(heap)
        what(*arguments)
    return ends


def test_two_that_compute_at_once_take_as_long_as_one_after_the_other() -> None:
    assert ends_of([(0.0, 1.0), (0.0, 1.0)], 1.0) == pytest.approx([2.0, 2.0])
    assert ends_of([(0.0, 1.0), (0.5, 1.0)], 1.0) == pytest.approx([1.5, 2.0])
    assert ends_of([(0.0, 1.0), (0.5, 0.1), (9.0, 1.0)], 1.0) == pytest.approx([1.1, 0.7, 10.0])


def test_what_they_take_from_each_other_is_as_measured() -> None:
    assert ends_of([(0.0, 1.0), (0.0, 1.0)], 0.2) == pytest.approx([1.2, 1.2])
    assert ends_of([(0.0, 1.0), (0.0, 1.0), (0.0, 1.0)], 0.2) == pytest.approx([1.4, 1.4, 1.4])
    assert ends_of([(0.0, 1.0), (0.5, 1.0)], 0.0) == [1.0, 1.5]


@pytest.mark.parametrize("is_exponential", [False, True])
def test_processor_sharing_is_insensitive(is_exponential: bool) -> None:
    """M/G/1-PS: the mean time in the system is service / (1 - load), whatever the distribution of the service."""
    stream, at, works = Random(3), 0.0, []
    for _ in range(20_000):
        at += stream.expovariate(0.6)
        works.append((at, stream.expovariate(1.0) if is_exponential else 1.0))
    spent = [end - begun for end, (begun, _) in zip(ends_of(works, 1.0), works, strict=True)]
    assert fmean(spent) == pytest.approx(1.0 / 0.4, rel=0.06)


def run(machine: Machine, coming: list[Arrival]) -> Outcome:
    fleet = make_fleet({"n": machine}, add_models("m", 2, SimulatedModel(num_bytes=GB)))
    return Simulation(ControllerCore(CoreConfig()), fleet.specs, fleet.nodes(steps_engine)).run(coming)


@pytest.mark.parametrize(("slowdown", "stretch"), [(0.0, 1.0), (0.3, 1.3), (1.0, 2.0)])
def test_two_models_that_answer_at_once_in_slots_of_shared_cores_slow_each_other_down(
    slowdown: float, stretch: float
) -> None:
    machine = Machine(num_slots=2, num_prewarmed=0, slowdown_beside=slowdown)
    long, short = Arrival(0.0, ModelId("m1"), 100, 2000), Arrival(20.0, ModelId("m2"), 100, 50)
    pace = run(machine, [long, short]).calls[1].tpot_s
    alone = run(machine, [short]).calls[0].tpot_s
    assert pace is not None
    assert alone is not None
    assert pace / alone == pytest.approx(stretch, rel=0.01)


def test_a_spare_process_that_warms_up_takes_its_time_from_the_answers_beside() -> None:
    """A spare is warmed while the answer is under way: work is conserved, so the answer ends that much later."""
    coming = [Arrival(0.0, ModelId("m1"), 100, 1000)]
    cost = CostModel(process_s=3.0)
    ends = [
        run(Machine(cost=cost, num_prewarmed=1, slowdown_beside=slowdown), coming).calls[0].ended_at
        for slowdown in (0.0, 1.0)
    ]
    assert ends[1] - ends[0] == pytest.approx(3.0, abs=0.05)

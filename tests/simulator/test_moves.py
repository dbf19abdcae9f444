"""Answers that move between simulated engines: they keep their tokens, and compute them again where they come to."""

import heapq
from itertools import count
from typing import Any

import pytest

from nearline.controller import CoreConfig
from nearline.controller.actions import AbortSequence
from nearline.controller.events import Event, FirstToken, SequenceEnded
from nearline.protocol import Digest, RequestId
from nearline.simulator import Arrival, Machine, SimulatedModel, Simulation, add_models, make_core, make_fleet, stepped
from nearline.simulator.engines import EnginePorts, SimulatedEngine, SimulatedSequence
from nearline.simulator.node import paced

MACHINE = Machine()
STEPS = MACHINE.cost.steps
PROMPT, ANSWER = 100, 50


class Clock:
    """Time, and one engine in it; `ends` are (what, when)."""

    def __init__(self, make: Any) -> None:
        self.now, self._heap, self._order = 0.0, list[Any](), count()
        self.ends: list[tuple[Event, float]] = []
        ports = EnginePorts(lambda: self.now, self._schedule, self._schedule, self._post, lambda: None)
        self.engine: SimulatedEngine = make(ports, MACHINE, STEPS, Digest("d"))
        self.engine.open()

    def _schedule(self, delay_s: float, what: Any, *arguments: Any) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), what, arguments))

    def _post(self, event: Event) -> None:
        self.ends.append((event, self.now))

    def run(self, until: float = float("inf")) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, what, arguments = heapq.heappop(self._heap)
            what(*arguments)
        self.now = max(self.now, min(until, 1e9))


@pytest.mark.parametrize("make", [paced, stepped], ids=["fast", "engine"])
def test_a_moved_answer_takes_its_tokens_along_and_only_the_rest_is_generated(make: Any) -> None:
    first = Clock(make)
    first.engine.submit(SimulatedSequence(RequestId("r"), 1, PROMPT, ANSWER))
    one = STEPS.decode_s(1, PROMPT + ANSWER // 2)
    first.run(STEPS.prefill_s(PROMPT) + 10.5 * one)
    done = first.engine.num_generated(RequestId("r"))
    assert done in (11, 12), "the first with the prefill, then one every step"
    first.engine.abort(RequestId("r"))
    assert first.engine.num_generated(RequestId("r")) is None
    first.run()
    assert [type(event) for event, _ in first.ends] == [FirstToken], "the engine it left says nothing more"
    second = Clock(make)
    second.engine.submit(SimulatedSequence(RequestId("r"), 2, PROMPT, ANSWER, done))
    second.run()
    ((begin, began_at), (end, ended_at)) = second.ends
    assert (begin, isinstance(end, SequenceEnded) and end.num_generated) == (FirstToken(RequestId("r"), 2), ANSWER)
    assert began_at == pytest.approx(STEPS.prefill_s(PROMPT + done), rel=0.01)
    assert ended_at - began_at == pytest.approx((ANSWER - done - 1) * one, rel=0.02)


@pytest.mark.parametrize("make", [paced, stepped], ids=["fast", "engine"])
def test_whoever_moves_ends_once_with_all_tokens(make: Any) -> None:
    """Two replicas of little memory, so that requests wait inside them and move."""
    spec = {"min_replicas": 2, "max_replicas": 2, "keep_alive_s": -1.0}
    models = add_models("m", 1, SimulatedModel(num_bytes=10**9), **spec)
    fleet = make_fleet({"n0": MACHINE, "n1": MACHINE}, models)
    simulation = Simulation(make_core("nearline", CoreConfig()), fleet.specs, fleet.nodes(make))
    model_id = models[0][0].model_id
    moved: list[RequestId] = []
    send = simulation._obey

    def spy(action: Any) -> None:
        if isinstance(action, AbortSequence):
            moved.append(action.request_id)
        send(action)

    simulation._obey = spy  # type: ignore[method-assign]
    arrivals = [Arrival(10.0 + 0.01 * n, model_id, 200, 20 + 37 * n % 400) for n in range(60)]
    outcome = simulation.run(arrivals)
    assert outcome.num_finished == 60
    assert all(call.num_generated == call.arrival.num_output_tokens for call in outcome.calls)
    assert len(moved) == simulation.core.decisions()["moved"]

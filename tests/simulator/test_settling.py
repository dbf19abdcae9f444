"""What an engine does once of its own, after a first second without work, keeps those waiting who come just then."""

import pytest

from nearline.controller import ControllerCore, CoreConfig
from nearline.protocol import ModelId
from nearline.simulator import Arrival, CostModel, Machine, SimulatedModel, Simulation, add_models, make_fleet, stepped

MB = 10**6
COST = CostModel(hop_s=0.0, bind_s=0.02, stop_s=0.03, dram_bytes_per_s=1e15)
USUAL_S = COST.steps.prefill_s(100)
SETTLE_S = 0.25


def first_tokens(*coming: tuple[str, float], num_output_tokens: int = 2) -> list[float]:
    """When the first tokens of calls of (model, gap since the end of the one before) come; the first from disk."""
    specs = add_models("m", 2, SimulatedModel(num_bytes=MB, settle_s=SETTLE_S), keep_alive_s=600.0)
    waits, arrivals, at = [], [], 0.0
    for name, gap_s in coming:
        fleet = make_fleet({"n": Machine(cost=COST)}, specs)
        arrivals.append(Arrival(at + gap_s, ModelId(name), 100, num_output_tokens))
        outcome = Simulation(ControllerCore(CoreConfig()), fleet.specs, fleet.nodes(stepped)).run(arrivals)
        at = outcome.calls[-1].ended_at
        waits.append(outcome.ttft_s[-1])
    return waits


@pytest.mark.parametrize(("gap_s", "beyond_s"), [(0.9, 0.0), (1.1, SETTLE_S - 0.1), (1.2, SETTLE_S - 0.2), (1.3, 0.0)])
def test_who_comes_while_an_engine_settles_waits_for_the_rest_of_it(gap_s: float, beyond_s: float) -> None:
    waits = first_tokens(("m1", 0.0), ("m1", gap_s))
    assert waits[1] == pytest.approx(USUAL_S + beyond_s)


def test_an_engine_settles_once_for_a_bind() -> None:
    waits = first_tokens(("m1", 0.0), ("m1", 1.5), ("m1", 1.1))
    assert waits[1:] == pytest.approx([USUAL_S, USUAL_S])


def test_an_engine_that_never_rested_settles_later() -> None:
    waits = first_tokens(("m1", 0.0), ("m1", 0.5), ("m1", 1.1))
    assert waits[1:] == pytest.approx([USUAL_S, USUAL_S + SETTLE_S - 0.1])


def test_a_stop_waits_for_it_too() -> None:
    slow, quick = (first_tokens(("m1", 0.0), ("m2", gap_s))[1] for gap_s in (1.1, 1.3))
    assert slow - quick == pytest.approx(SETTLE_S - 0.1)

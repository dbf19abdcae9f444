"""Nodes die and callers hang up, and still every request ends exactly once."""

import pytest

from nearline.controller import ControllerCore, CoreConfig
from nearline.simulator import (
    Faults,
    Machine,
    Outcome,
    SimulatedModel,
    Simulation,
    Traffic,
    add_models,
    arrivals,
    make_fleet,
    paced,
    stepped,
)
from nearline.simulator.node import MakeEngine

GB = 10**9


def run(
    seed: int, seconds: float, rate_per_s: float = 6.0, make_engine: MakeEngine = paced
) -> tuple[Simulation, Outcome]:
    machine = Machine(num_slots=2, num_prewarmed=1, dram_bytes=10 * GB)
    models = add_models("m", 6, SimulatedModel(num_bytes=2 * GB), keep_alive_s=20.0, max_replicas=2)
    fleet = make_fleet({f"n{n}": machine for n in range(3)}, models)
    faults = Faults(seed=seed, node_loss_every_s=15.0, node_back_s=6.0, cancel_part=0.2, patience_s=3.0)
    simulation = Simulation(ControllerCore(CoreConfig()), fleet.specs, fleet.nodes(make_engine), faults)
    kinds = {"num_tenants": 3, "batch_part": 0.3}
    traffic = Traffic(num_models=6, rate_per_s=rate_per_s, seconds=seconds, seed=seed, **kinds)
    return simulation, simulation.run(arrivals(traffic))


def check(simulation: Simulation, outcome: Outcome) -> None:
    simulation.core.check()
    assert simulation.core.fleet.requests == {}
    assert outcome.num_node_losses > 0
    assert outcome.num_cancelled > 0
    ended = outcome.num_finished + outcome.num_cancelled + sum(outcome.rejected.values())
    assert outcome.num_arrived == ended
    assert outcome.num_finished > 0.6 * outcome.num_arrived


@pytest.mark.parametrize("seed", [1, 2])
def test_no_request_is_lost_or_ends_twice_when_nodes_die_and_callers_leave(seed: int) -> None:
    check(*run(seed, 120.0))


def test_the_same_holds_for_engines_that_run_step_by_step() -> None:
    check(*run(1, 60.0, make_engine=stepped))


def test_a_run_with_faults_repeats() -> None:
    assert run(3, 60.0)[1] == run(3, 60.0)[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_same_for_a_million_events() -> None:
    simulation, outcome = run(7, 60_000.0)
    check(simulation, outcome)
    assert outcome.num_events > 1_000_000

"""The simulation: equal seeds, equal actions; queueing theory where theory knows the answer."""

import json
import os
import subprocess
import sys
from random import Random
from statistics import fmean

import pytest

from nearline.controller import ControllerCore, CoreConfig
from nearline.protocol import ModelId, NodeId
from nearline.simulator import (
    Arrival,
    CostModel,
    Fleet,
    Machine,
    Outcome,
    SimulatedModel,
    Simulation,
    Traffic,
    add_models,
    arrivals,
    make_fleet,
)

GB = 10**9


def fleet(num_models: int, num_nodes: int, cost: CostModel, keep_alive_s: float = 60.0) -> Fleet:
    machine = Machine(cost=cost, dram_bytes=10 * GB)
    models = add_models("m", num_models, SimulatedModel(num_bytes=4 * GB), keep_alive_s=keep_alive_s)
    return make_fleet({f"n{n}": machine for n in range(num_nodes)}, models)


def build(num_models: int, num_nodes: int, cost: CostModel, keep_alive_s: float = 60.0) -> Simulation:
    made = fleet(num_models, num_nodes, cost, keep_alive_s)
    return Simulation(ControllerCore(CoreConfig()), made.specs, made.nodes())


def run(seed: int, **changes: float) -> tuple[Simulation, Outcome]:
    simulation = build(8, 2, CostModel())
    rates = {"rate_per_s": 3.0, "seconds": 200.0, **changes}
    outcome = simulation.run(arrivals(Traffic(num_models=8, seed=seed, **rates)))
    return simulation, outcome


def test_every_request_ends_once_and_the_core_is_sound_at_the_end() -> None:
    simulation, outcome = run(1)
    simulation.core.check()
    assert outcome.num_arrived == outcome.num_finished + sum(outcome.rejected.values())
    assert outcome.num_arrived > 500
    assert simulation.core.fleet.requests == {}
    assert len(outcome.ttft_s) == outcome.num_finished


def test_equal_seeds_give_equal_digests_and_others_do_not() -> None:
    assert run(1)[1] == run(1)[1]
    assert run(1)[1].digest != run(2)[1].digest


def test_the_command_prints_the_same_json_under_two_hash_seeds() -> None:
    command = [sys.executable, "-m", "nearline.simulator", "--models", "6", "--nodes", "2", "--seconds", "60"]
    outputs = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("0", "1")
    ]
    assert outputs[0] == outputs[1]
    shown = json.loads(outputs[0])
    assert shown["num_arrived"] == shown["num_finished"] > 0
    assert shown["ttft_s"]["p50"] <= shown["ttft_s"]["p90"] <= shown["ttft_s"]["max"]


def test_a_single_warm_server_waits_as_the_pollaczek_khinchine_formula_says() -> None:
    """M/D/1 at load 0.6: mean wait in queue = load / (2 · (1 - load)) · service time."""
    cost = CostModel(max_running=1)
    first_s = cost.steps.prefill_s(100)
    service_s = first_s + 49 * cost.steps.decode_s(1, 100 + 49 // 2)
    gaps, now, coming = Random(5), 0.0, [Arrival(0.0, ModelId("m"), 100, 50)]
    for _ in range(30_000):
        now += gaps.expovariate(0.6 / service_s)
        coming.append(Arrival(100.0 + now, ModelId("m"), 100, 50))
    outcome = build(1, 1, cost).run(coming)
    waits = [ttft - first_s for ttft in outcome.ttft_s[1:]]
    assert fmean(waits) == pytest.approx(0.6 / (2 * 0.4) * service_s, rel=0.08)


def test_one_cold_start_takes_the_bytes_over_the_bandwidth_and_binding_meanwhile() -> None:
    cost = CostModel(ssd_bytes_per_s=2e9, bind_s=0.25)
    outcome = build(1, 1, cost).run([Arrival(0.0, ModelId("m"), 100, 2)])
    assert outcome.ttft_s == [pytest.approx(4 / 2 + cost.steps.prefill_s(100))]


def test_a_model_that_went_to_sleep_comes_back_from_dram() -> None:
    cost = CostModel(ssd_bytes_per_s=2e9, dram_bytes_per_s=8e9, bind_s=0.25)
    simulation = build(1, 1, cost, keep_alive_s=10.0)
    outcome = simulation.run([Arrival(0.0, ModelId("m"), 100, 2), Arrival(60.0, ModelId("m"), 100, 2)])
    assert outcome.ttft_s[1] == pytest.approx(4 / 8 + cost.steps.prefill_s(100))
    assert {tier.value: n for tier, n in simulation.nodes[NodeId("n0")].starts_by_tier.items()} == {"ssd": 1, "dram": 1}


def test_without_a_spare_process_a_start_waits_for_one() -> None:
    cost = CostModel(ssd_bytes_per_s=8e9, bind_s=0.25, process_s=3.0)
    made = make_fleet({"n": Machine(cost=cost, num_prewarmed=0)}, add_models("m", 1, SimulatedModel(num_bytes=4 * GB)))
    simulation = Simulation(ControllerCore(CoreConfig()), made.specs, made.nodes())
    outcome = simulation.run([Arrival(0.0, ModelId("m"), 100, 2)])
    assert outcome.ttft_s == [pytest.approx(3.0 + 0.25 + cost.steps.prefill_s(100))]

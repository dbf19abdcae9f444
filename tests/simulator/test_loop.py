"""The simulation: equal seeds, equal actions; queueing theory where theory knows the answer."""

import json
import os
import subprocess
import sys
from random import Random
from statistics import fmean

import pytest

from nearline.controller import CoreConfig
from nearline.protocol import CheckpointInfo, CheckpointKind, Digest, ModelId, ModelSpec, NodeId
from nearline.simulator import Arrival, CostModel, Outcome, SimulatedNode, Simulation, Traffic, arrivals
from nearline.simulator.arrivals import model_ids

GB = 10**9


def build(num_models: int, num_nodes: int, cost: CostModel, **settings: float) -> Simulation:
    sizes = {Digest(f"d-{name}"): 4 * GB for name in model_ids(num_models)}
    models = [
        ModelSpec(
            name,
            CheckpointInfo(Digest(f"d-{name}"), CheckpointKind.MODEL, 4 * GB, "", "", "", "", ()),
            0.0,
            keep_alive_s=settings.get("keep_alive_s", 60.0),
        )
        for name in model_ids(num_models)
    ]
    nodes = [SimulatedNode(NodeId(f"n{n}"), 1, 10 * GB, sizes, cost) for n in range(num_nodes)]
    return Simulation(CoreConfig(), models, nodes)


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
    service_s = cost.first_token_s(100) + cost.decode_s(49, 1)
    gaps, now, coming = Random(5), 0.0, [Arrival(0.0, ModelId("m1"), 100, 50)]
    for _ in range(30_000):
        now += gaps.expovariate(0.6 / service_s)
        coming.append(Arrival(100.0 + now, ModelId("m1"), 100, 50))
    outcome = build(1, 1, cost).run(coming)
    waits = [ttft - cost.first_token_s(100) for ttft in outcome.ttft_s[1:]]
    assert fmean(waits) == pytest.approx(0.6 / (2 * 0.4) * service_s, rel=0.08)


def test_one_cold_start_takes_the_bytes_over_the_bandwidth_plus_binding() -> None:
    cost = CostModel(ssd_bytes_per_s=2e9, bind_s=0.25)
    outcome = build(1, 1, cost).run([Arrival(0.0, ModelId("m1"), 100, 2)])
    assert outcome.ttft_s == [pytest.approx(4 / 2 + 0.25 + cost.first_token_s(100))]


def test_a_model_that_went_to_sleep_comes_back_from_dram() -> None:
    cost = CostModel(ssd_bytes_per_s=2e9, dram_bytes_per_s=8e9, bind_s=0.25)
    simulation = build(1, 1, cost, keep_alive_s=10.0)
    outcome = simulation.run([Arrival(0.0, ModelId("m1"), 100, 2), Arrival(60.0, ModelId("m1"), 100, 2)])
    assert outcome.ttft_s[1] == pytest.approx(4 / 8 + 0.25 + cost.first_token_s(100))
    assert {tier.value: n for tier, n in simulation.nodes[NodeId("n0")].starts_by_tier.items()} == {"ssd": 1, "dram": 1}

"""Policies by name: all of them serve everybody, each shows what it is for, and none is the live one in disguise."""

import argparse
from pathlib import Path

import pytest

from nearline.controller import CoreConfig
from nearline.protocol import ModelId, TenantId
from nearline.simulator import (
    POLICIES,
    Arrival,
    Machine,
    Outcome,
    SimulatedModel,
    Simulation,
    add_models,
    make_core,
    make_fleet,
)
from nearline.simulator.__main__ import main, parse, run

FLEET = [
    "--models",
    "6",
    "--nodes",
    "2",
    "--slots",
    "1",
    "--model-gb",
    "8",
    "--dram-gb",
    "40",
    "--keep-alive",
    "20",
    "--zipf",
    "0.5",
    "--seed",
    "4",
]


def outcome(policy: str, *more: str) -> Outcome:
    return run(options(policy, *more))[1]


def options(policy: str, *more: str) -> argparse.Namespace:
    return parse([*FLEET, "--policy", policy, "--rate", "1.5", "--seconds", "80", *more])


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_ends_every_request_once_and_repeats(policy: str) -> None:
    simulation, first = run(options(policy))
    simulation.core.check()
    assert first.num_arrived == first.num_finished + sum(first.rejected.values())
    assert first.num_arrived > 80
    assert outcome(policy).digest == first.digest


def test_single_ideas_decide_differently_from_each_other_and_from_all_together() -> None:
    mixed = ("--tenants", "2", "--batch-part", "0.4", "--rate", "3")
    names = ("nearline", "fcfs", "edf", "fair", "locality", "random")
    assert len({outcome(name, *mixed).digest for name in names}) == len(names)


def test_fair_counters_protect_a_tenant_from_a_flood_and_arrival_order_does_not() -> None:
    flood = [Arrival(1.0, ModelId("m"), 200, 100, TenantId("many")) for _ in range(300)]
    few = [Arrival(2.0 + n, ModelId("m"), 200, 100, TenantId("few")) for n in range(5)]
    waits = {}
    for name in ("fair", "fcfs"):
        fleet = make_fleet({"n": Machine()}, add_models("m", 1, SimulatedModel(num_bytes=10**9)))
        core = make_core(name, CoreConfig(max_wait_targets=1e6))
        calls = Simulation(core, fleet.specs, fleet.nodes()).run([*flood, *few]).calls
        waits[name] = max(call.ttft_s or 0.0 for call in calls if call.arrival.tenant == "few")
    assert waits["fair"] < 6.0 < 30.0 < waits["fcfs"]


def test_the_command_takes_a_fleet_file_and_writes_json(tmp_path: Path) -> None:
    fleet, out = tmp_path / "fleet.toml", tmp_path / "out.json"
    fleet.write_text('[[nodes]]\nslots = 2\n\n[[models]]\ncount = 2\nname = "chat"\ngb = 4.0\n')
    load = ["--rate", "1", "--seconds", "20"]
    assert main(["--fleet", str(fleet), *load, "--detail", "engine", "--json", str(out)]) == 0
    assert '"policy": "nearline"' in out.read_text()
    assert main(["--fleet", str(tmp_path / "none.toml")]) == 2

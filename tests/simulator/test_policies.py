"""Policies by name: all of them serve everybody, each shows what it is for, and none is the live one in disguise."""

import argparse
import json
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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--rate", "0"], "must be more than 0"),
        (["--cv", "-1"], "must be more than 0"),
        (["--batch-part", "2"], "at least 0 and at most 1"),
        (["--nodes", "0"], "at least 1"),
        (["--seconds", "nan"], "out of range"),
        (["--set", "stop_drains=1"], "there is stop_drain_s"),
        (["--set", "nope=1"], "dispatch_headroom, "),
        (["--set", "stop_s=soon"], "--set stop_s=soon: "),
        (["--fleet", "/nope.toml"], "cannot read /nope.toml: No such file or directory"),
        (["--trace", "/nope.csv"], "cannot read /nope.csv: No such file or directory"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_words(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(wrong)
    except SystemExit as left:
        status = int(str(left.code))
    assert status == 2
    assert said in capsys.readouterr().err


def test_a_bare_run_keeps_its_promises_and_an_overloaded_one_says_that_it_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["attainment"]["interactive"]["attained"] > 0.9
    assert told.err == ""
    assert main(["--rate", "5", "--seconds", "60"]) == 0
    assert "of the promises were kept; try a lower --rate" in capsys.readouterr().err

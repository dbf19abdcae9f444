"""The evidence scripts on made-up data: their controls fail where they must, and no published file is needed."""

from pathlib import Path
from random import Random

import pytest

from benchmarks.evidence import placement, ssjf, vtc
from nearline.controller.policy.fairness import spread_bound
from nearline.protocol import TenantId


def test_jobs_complete_sooner_by_the_prediction_and_by_nothing_else() -> None:
    stream = Random(1)
    rows = [(length, int(length > 200)) for length in (stream.randint(1, 500) for _ in range(300))]
    perfect, classes, constant, inverted = (
        ssjf.reduction(rows, 1.0, bucket)
        for bucket in (lambda row: row[0], lambda row: row[1], lambda _: 0, lambda row: -row[1])
    )
    assert perfect > classes > 0.1
    assert constant == 0.0
    assert inverted < 0


def calls() -> list[vtc.Call]:
    """One tenant floods in bursts, another asks steadily."""
    found = [vtc.Call(TenantId("steady"), 1.5 * n, 100, 150) for n in range(150)]
    found += [vtc.Call(TenantId("flood"), 60.0 * (n // 150), 200, 300) for n in range(450)]
    return sorted(found, key=lambda call: call.arrived_at)


def test_the_same_requests_stay_within_the_bound_under_our_counters_and_not_first_come_first_served() -> None:
    bound = spread_bound(vtc.MAX_TOKENS, vtc.POOL_TOKENS)
    worst = {}
    for kind in ("FCFS", "VTC", "VTC_predict"):
        machine = vtc.Machine(kind)
        machine.run(calls())
        worst[kind] = machine.worst
    assert worst["VTC"] <= bound < worst["FCFS"]
    assert worst["VTC_predict"] <= bound


def test_a_recorded_run_and_its_difference_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(
        '{"config": {}, "result": {"responses": ['
        '{"adapter_dir": "a", "prompt_len": 60, "output_len": 30, "req_time": 0, "first_token_latency": 0,'
        ' "request_latency": 60},'
        '{"adapter_dir": "b", "prompt_len": 60, "output_len": 30, "req_time": 0, "first_token_latency": 600,'
        ' "request_latency": 660}]}}'
    )
    largest, _ = vtc.difference(vtc.recorded(path))
    assert largest == pytest.approx(2.0), "in the first minute a had 120 of 120 weighted tokens, b none of 120"


def test_exchanging_the_placement_changes_where_models_start_and_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        placement, "FLEET", "--models 8 --nodes 3 --slots 1 --model-gb 13 --cv 4 --seconds 150 --keep-alive 20"
    )
    monkeypatch.setattr(placement, "SEEDS", (5,))
    rows = {name: placement.row(0.5, 55, name) for name in placement.POLICIES}
    ours = next(name for name, policy in placement.POLICIES.items() if policy == "nearline")
    assert rows["random node"] != rows["locality only"]
    assert rows[ours] == placement.row(0.5, 55, ours), "the exchange is undone"

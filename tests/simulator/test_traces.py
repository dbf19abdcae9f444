"""Recorded traffic: small files of each format, read as what they say and dealt out the same way every time."""

import json
from pathlib import Path

import pytest

from nearline.protocol import SloClass
from nearline.simulator import Spread, read_trace
from nearline.simulator.arrivals import model_ids

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:13.9799600,100,0
"""


def spread(**changes: object) -> Spread:
    return Spread(**{"models": tuple(model_ids(3)), "seed": 1, **changes})  # type: ignore[arg-type]


def test_an_azure_csv(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    rows = read_trace(path, spread(speedup=2.0))
    assert [round(a.at, 4) for a in rows] == [0.0, 0.026, 5.0]
    assert [(a.num_prompt_tokens, a.num_output_tokens) for a in rows] == [(4808, 10), (3180, 8), (100, 1)]
    assert rows == read_trace(path, spread(speedup=2.0))


def test_a_mooncake_jsonl_is_spread_inside_its_ticks_of_three_seconds(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    lines = [{"timestamp": 3000 * (n // 2), "input_length": 600 + n, "output_length": 5, "hash_ids": [n // 4, 9]}
             for n in range(8)]  # fmt: skip
    path.write_text("\n".join(json.dumps(line) for line in lines))
    rows = read_trace(path, spread())
    assert sorted(a.num_prompt_tokens for a in rows) == [600 + n for n in range(8)]
    assert [a.at for a in rows] == sorted(a.at for a in rows)
    assert 6.0 < rows[-1].at < 12.0
    assert {a.prefix_hash for a in rows} == {1, 2}


def test_a_vtc_run_keeps_its_clients_as_tenants(tmp_path: Path) -> None:
    path = tmp_path / "vtc.jsonl"
    responses = [{"adapter_dir": f"client-{n % 2}", "prompt_len": 7, "output_len": 9, "req_time": 5.0 - n}
                 for n in range(3)]  # fmt: skip
    path.write_text(json.dumps({"config": {}, "result": {"responses": responses}}))
    rows = read_trace(path, spread())
    assert [(a.at, a.tenant) for a in rows] == [(0.0, "client-0"), (1.0, "client-1"), (2.0, "client-0")]
    assert {a.tenant for a in read_trace(path, spread(num_tenants=2))} <= {"t0", "t1"}


def test_another_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("Over all the hills\nis peace\n")
    with pytest.raises(ValueError, match=r"poem\.txt: not a known trace"):
        read_trace(path, spread())


def test_servegen_clients_keep_their_rates_their_lengths_and_their_names(tmp_path: Path) -> None:
    for name, rate in (("chunk-3", 2.0), ("chunk-11", 1.0)):
        rows = [f"0,{rate},1.0,Gamma,1.0,0.5", f"600,{2 * rate},2.0,Weibull,0.7,0.1", "1200,0,,,,"]
        (tmp_path / f"{name}-trace.csv").write_text("\n".join(rows))
        lengths = {"input_tokens": "{100: 0.25, 200: 0.75}", "output_tokens": "{7: 1.0}"}
        (tmp_path / f"{name}-dataset.json").write_text(json.dumps({"0": lengths, "21600": {}}))
    rows = read_trace(tmp_path, spread(seconds=1200.0))
    assert {a.tenant for a in rows} == {"chunk-3", "chunk-11"}
    busy = [a for a in rows if a.tenant == "chunk-3"]
    assert len([a for a in busy if a.at < 600]) == pytest.approx(1200, rel=0.1)
    assert len([a for a in busy if a.at >= 600]) == pytest.approx(2400, rel=0.1)
    assert sum(a.num_prompt_tokens == 200 for a in rows) / len(rows) == pytest.approx(0.75, abs=0.03)
    assert {a.num_output_tokens for a in rows} == {7}


def test_a_part_of_a_trace_is_batch_work(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE.splitlines()[0] + "\n" + "\n".join([AZURE.splitlines()[1]] * 400))
    classes = [a.slo.slo_class for a in read_trace(path, spread(batch_part=0.25))]
    assert classes.count(SloClass.BATCH_1M) / 400 == pytest.approx(0.25, abs=0.06)

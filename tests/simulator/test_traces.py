"""Recorded traffic: small files of each format, read as what they say and dealt out the same way every time."""

import json
from pathlib import Path

import pytest

from nearline.simulator import Spread, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:13.9799600,100,0
"""


def spread(**changes: object) -> Spread:
    return Spread(**{"num_models": 3, "seed": 1, **changes})  # type: ignore[arg-type]


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

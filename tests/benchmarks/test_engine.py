"""The engine benchmark: what it says of measurements, and a short run of it on the real model."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import engine_report
from benchmarks.engine_ours import Stream, random_prompt, read_bytes_per_s

ROOT = Path(__file__).resolve().parents[2]


def test_ratios_are_of_one_round_and_against_the_fastest_rival() -> None:
    aim = engine_report.AIMS[0]
    seconds = {
        ("nearline bf16", "decode 1"): [0.010, 0.020, 0.010],
        ("llama.cpp BF16", "decode 1"): [0.015, 0.030, 0.014],
        ("llama.cpp F16", "decode 1"): [0.018],
    }
    assert engine_report.ratios(seconds, aim) == pytest.approx([1.5, 1.5, 1.4])
    text = engine_report.report(seconds, {"gap": [2.5]}, {1: {"forward": 0.01}}, {}, {"nearline bf16": "nearline"})
    assert "| bf16 batch 1 / llama.cpp BF16 or llama.cpp F16 | ≥ 1.3 × | 1.50 (1.40–1.50) | yes |" in text
    assert "≤ 2 | 2.50 (2.50–2.50) | no: 0.80 of the aim |" in text
    assert "| nearline bf16 | 100 |" in text


def test_rivals_that_are_missing_leave_their_aims_out() -> None:
    seconds = {("nearline bf16", "decode 8"): [0.02]}
    assert engine_report.ratios(seconds, engine_report.AIMS[1]) == []
    assert "llama.cpp" not in engine_report.report(seconds, {}, {1: {}}, {}, {})


def test_a_missed_aim_is_held_against_what_the_machine_allows() -> None:
    seconds = {("nearline bf16", "decode 32"): [0.04], ("llama.cpp BF16", "decode 32"): [0.08]}
    text = engine_report.report(seconds, {}, {32: {"forward": 0.04}}, {"decode 32": 0.03}, {})
    assert "| batch 32 / llama.cpp BF16 | 20.0 | 40.0 | 30.0 | 0.75 | is below the floor |" in text
    text = engine_report.report(seconds, {}, {32: {"forward": 0.04}}, {"decode 32": 0.01}, {})
    assert "asks for 0.50 of the floor" in text


def test_the_longest_gap_is_the_one_that_ends_after_the_moment_asked_for() -> None:
    stream = Stream(added_at=0.0, token_at=[1.0, 4.0, 4.5, 6.0])
    assert stream.ttft_s == 1.0
    assert stream.max_gap_s(since=4.2) == 1.5
    assert stream.max_gap_s(since=3.0) == 3.0


def test_prompts_repeat_for_a_seed_and_memory_is_read_at_some_rate() -> None:
    assert random_prompt(5, 1) == random_prompt(5, 1) != random_prompt(5, 2)
    assert 1e8 < read_bytes_per_s() < math.inf


@pytest.mark.slow
def test_a_quick_run_measures_us_alone_and_writes_nothing(smollm2_gguf: Path) -> None:
    before = sorted((ROOT / "benchmarks" / "results").iterdir())
    command = [sys.executable, "-m", "benchmarks.engine", "--quick", "--model", str(smollm2_gguf)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("| nearline bf16 |")]
    assert all(float(cell) > 0 for cell in row.split("|")[2:5])
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before

"""The check that a GPU is served correctly, as far as a machine without one can run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments]
    settings = plain | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, env=settings, timeout=100, check=False)


@pytest.mark.slow
def test_interpreted_kernels_engine_and_loader_are_as_aimed() -> None:
    pytest.importorskip("triton")
    done = run("--interpret")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    for what in ("paged attention, bfloat16", "Gemma2 in float32", "graphs on and off", "closing half-way"):
        assert f"{what}" in done.stdout
    assert "0 not as aimed" in done.stdout


def test_without_a_device_it_says_so_and_what_else_can_be_done() -> None:
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "--interpret" in done.stderr
    assert not done.stdout

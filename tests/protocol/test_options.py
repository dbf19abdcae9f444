"""Numbers on command lines have bounds, and whoever is outside is told them."""

import subprocess
import sys
from pathlib import Path

import pytest

CONTROLLER = ("nearline.controller", "--redis", "unix:///unused")
AGENT = ("nearline.node_agent", "--controller", "http://127.0.0.1")


@pytest.mark.parametrize(
    ("command", "flag", "text", "said"),
    [
        (CONTROLLER, "--port", "99999", "a whole number from 0 to 65535, not '99999'"),
        (CONTROLLER, "--max-running-jobs", "0", "a whole number from 1 to"),
        (CONTROLLER, "--max-running-jobs", "1.5", "a whole number from 1 to"),
        (CONTROLLER, "--solver-limit", "nan", "a number from 0 to 3600, not 'nan'"),
        (CONTROLLER, "--result-ttl", "-5", "a number from 1 to"),
        (AGENT, "--tpot-ms", "1e-300", "a number from 0.1 to"),
        (AGENT, "--hang-timeout", "inf", "a number from 0.1 to 86400"),
        (AGENT, "--slots", "x" * 500, "a whole number from 1 to 1000"),
    ],
)
def test_a_number_out_of_bounds_is_refused_before_anything_starts(
    tmp_path: Path, command: tuple[str, ...], flag: str, text: str, said: str
) -> None:
    module, *rest = command
    arguments = [sys.executable, "-m", module, *rest, "--data-dir", str(tmp_path / "d"), f"{flag}={text}", "--check"]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 4000

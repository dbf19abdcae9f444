"""The processes beside the controller: a Ctrl-C in the terminal they share with it is not theirs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nearline.controller.actions import SolvePlan
from nearline.controller.pipes import LENGTH
from nearline.controller.policy.plans import PlanGroup, PlanSlot
from nearline.controller.side_process import ProcessEnded, SideProcess
from nearline.protocol import encode

WISH = SolvePlan(1, (PlanGroup("a", 1.0, 4.0, weight=1.0),), (PlanSlot(None, {"a": 1.0}),), 1.0, "test")
QUESTIONS = {"nearline.controller.solver": encode(WISH), "nearline.controller.text.grammar_worker": b"regex\n[a-z]+"}


@pytest.mark.parametrize("module", QUESTIONS)
def test_a_ctrl_c_leaves_it_at_work_and_it_ends_without_a_word_when_the_controller_does(module: str) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-m", module], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(2):
            process.stdin.write(LENGTH.pack(len(QUESTIONS[module])) + QUESTIONS[module])
            process.stdin.flush()
            (num_bytes,) = LENGTH.unpack(process.stdout.read(LENGTH.size))
            process.stdout.read(num_bytes)
            os.kill(process.pid, signal.SIGINT)
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


async def test_how_a_process_ended_is_told_however_soon_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying.py").write_text("import os, signal\nos.read(0, 1)\nos.kill(os.getpid(), signal.SIGXCPU)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = SideProcess("dying")
    for _ in range(20):
        with pytest.raises(ProcessEnded) as caught:
            await process.ask(b"?", 60.0)
        assert caught.value.returncode == -signal.SIGXCPU

"""A child of `nearline up`: what it writes is kept within bounds while it writes on."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nearline.client.platform import _stop_all
from nearline.client.processes import Child
from nearline.protocol.log_files import MAX_SERVICE_LOG_BYTES, older

NUM_TURNS, NUM_LINES, LINE_BYTES = 4, 10_000, 1_000
CHATTY = f"""
import pathlib, sys, time
for turn in range({NUM_TURNS}):
    while not pathlib.Path(sys.argv[1], str(turn)).exists():
        time.sleep(0.01)
    for number in range({NUM_LINES}):
        print(f"{{turn}} {{number:{LINE_BYTES - 3}d}}")
    sys.stdout.flush()
"""

STUBBORN = """
import pathlib, signal, sys
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
pathlib.Path(sys.argv[1]).touch()
while len(asked) < 2:
    signal.pause()
"""


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


async def test_a_chatty_childs_log_stays_small_and_keeps_every_line_between_two_cuts(tmp_path: Path) -> None:
    child = Child("chatty", [sys.executable, "-c", CHATTY, str(tmp_path)], tmp_path / "chatty.log")
    await child.start()
    for turn in range(NUM_TURNS):
        (tmp_path / str(turn)).touch()
        last = f"{turn} {NUM_LINES - 1:{LINE_BYTES - 3}d}\n".encode()
        await asyncio.to_thread(_until, lambda last=last: child.log.read_bytes().endswith(last))
        assert child.log.stat().st_size == NUM_LINES * LINE_BYTES * (1 + turn % 2), "no hole where it was cut"
        child.cut_log()
    assert child.process is not None
    await child.process.wait()
    assert NUM_LINES * LINE_BYTES < MAX_SERVICE_LOG_BYTES < 2 * NUM_LINES * LINE_BYTES
    assert (child.log.read_bytes(), older(child.log).read_bytes().count(b"\n")) == (b"", 2 * NUM_LINES)


async def test_the_controller_stops_while_its_nodes_run_and_at_once_when_asked_again(tmp_path: Path) -> None:
    agent = Child("node_agent", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "agent.log")
    command = [sys.executable, "-c", STUBBORN, str(tmp_path / "up")]
    children = [Child("valkey", agent.command, tmp_path / "v.log"), Child("controller", command, tmp_path / "c.log")]
    children.append(agent)
    for child in children:
        await child.start()
    await asyncio.to_thread(_until, (tmp_path / "up").exists)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        assert all(child.is_running for child in children)
        os.kill(os.getpid(), signal.SIGINT)

    await _stop_all(children, say)
    assert said == ["letting requests finish; Ctrl-C again ends at once"]
    assert not any(child.is_running for child in children)
    controller = children[1].process
    assert controller is not None
    assert controller.returncode == 0, "it was not killed"

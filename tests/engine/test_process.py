"""How an engine process lives and ends: with its parent, its socket, its signals, and never for a request."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nearline.protocol import FinishReason, Request
from nearline.protocol.frames import BindFailed, StepDone
from tests.engine.engine_process import INSTANCE, EngineUnderTest
from tests.engine.fake_engine import make_request


def request(name: str, prompt: list[int], max_tokens: int = 12) -> Request:
    return make_request(name, prompt, max_tokens=max_tokens, ignore_eos=True)


def test_a_ctrl_c_is_not_its_business_and_a_sigterm_ends_it_cleanly_in_mid_stream(checkpoints: dict[str, Path]) -> None:
    engine = EngineUnderTest()
    engine.process.send_signal(signal.SIGINT)
    engine.bind(checkpoints["a"])
    engine.submit(request("r", [1, 2], max_tokens=400))
    engine.expect(StepDone, where=lambda step: bool(step.updates))
    engine.process.send_signal(signal.SIGTERM)
    assert engine.exit_code() == 0
    assert "Traceback" not in engine.close()


def test_a_backlog_does_not_deadlock_it_and_what_is_not_our_protocol_ends_it(checkpoints: dict[str, Path]) -> None:
    """The test writes thousands of requests without reading once; the engine must go on reading while it sends."""
    engine = EngineUnderTest()
    engine.bind(checkpoints["a"], kv_bytes=4 << 20)
    names = [f"r{i}" for i in range(3000)]
    engine.ours.settimeout(60)
    engine.submit(*[request(name, [300] * 100) for name in names])  # outside the vocabulary: an answer each
    assert all(engine.outcome(name)[1].finish_reason is FinishReason.ERROR for name in names[::500])
    assert len(engine.generate(request("good", [1]))[0]) == 12
    engine.send_raw(b"\x03\x00\x00\x00abc")
    assert engine.exit_code() == 2
    logged = engine.close()
    assert "not a message" in logged
    assert "Traceback" not in logged


def test_bytes_that_turn_out_corrupt_end_every_sequence_and_the_instance(checkpoints: dict[str, Path]) -> None:
    engine = EngineUnderTest()
    engine.bind(checkpoints["a"], is_filled=False)
    engine.submit(request("one", [1, 2]), request("two", [3]))
    time.sleep(0.1)
    engine.pool.mark(engine.frames[-1], 2)
    for name in ("one", "two"):
        _, last = engine.outcome(name)
        assert last.finish_reason is FinishReason.ERROR
        assert last.error is not None
        assert last.error.code == "checkpoint_unreadable"
    if not any(isinstance(message, BindFailed) for message in engine.inbox):
        engine.expect(BindFailed)
    (failed,) = [message for message in engine.inbox if isinstance(message, BindFailed)]
    assert (failed.instance_id, failed.error.code) == (INSTANCE, "checkpoint_unreadable")
    assert engine.exit_code() == 3
    engine.close()


SWALLOWING = """
import signal
from nearline.engine.__main__ import leave
signal.signal(signal.SIGTERM, leave)
class Swallows:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
Swallows()
print("it goes on")
"""


def test_a_sigterm_ends_it_even_where_exceptions_are_swallowed() -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


PARENT = """
import socket, subprocess, sys, time
ours, theirs = socket.socketpair()
fd = str(theirs.fileno())
command = [sys.executable, "-m", "nearline.engine", "--socket-fd", fd, "--pool-fd", fd, "--ready-fd", fd]
print(subprocess.Popen(command, pass_fds=(theirs.fileno(),)).pid, flush=True)
time.sleep(120)
"""


def test_the_kernel_ends_it_with_its_parent_whatever_it_is_doing() -> None:
    """Killed while the engine still imports, and with the agent's end of the socket held open by the engine itself."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert _soon(lambda: _ignores_ctrl_c(pid)), "the engine has not come to life"
    parent.kill()
    parent.wait()
    assert _soon(lambda: not _is_alive(pid))


def _soon(condition: Callable[[], bool], timeout_s: float = 60) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def _ignores_ctrl_c(pid: int) -> bool:
    """Whether the process has come past its first lines, where it ties itself to its parent."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return bool(ignored & 1 << (signal.SIGINT - 1))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False

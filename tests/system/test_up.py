"""`nearline up`: one owner per data directory, clear refusals, nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from tests.system.conftest import RunningPlatform, eventually, register, running, start_platform


def run_up(data_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nearline", "up", "--data-dir", str(data_dir), *flags]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_a_second_up_on_the_same_data_is_refused(platform: RunningPlatform) -> None:
    refused = run_up(platform.data_dir, "--port", "0")
    assert refused.returncode == 1
    assert "in use by another" in refused.stderr
    assert str(platform.process.pid) in refused.stderr


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run_up(tmp_path / "d", "--port", str(port))
    assert refused.returncode == 1
    assert str(port) in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_data_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = run_up(tmp_path / "file" / "d")
    assert refused.returncode == 1
    assert "--data-dir" in refused.stderr


def test_it_leaves_no_process_socket_or_shared_memory(tmp_path: Path, tiny_model: Path) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    data = tmp_path / "data"
    with running(data) as platform:
        with platform.client() as client:
            register(client, "tiny", tiny_model)
            client.function("tiny").remote("hi", max_tokens=2)
        children = psutil.Process(platform.process.pid).children(recursive=True)
        assert len(children) >= 4
        assert platform.stop() == 0
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert set(os.listdir("/dev/shm")) <= shared_before
    assert not [path for path in data.rglob("*") if path.is_socket()]


def test_its_children_die_with_it_even_by_kill_9(tmp_path: Path) -> None:
    platform = start_platform(tmp_path / "data")
    platform.wait_ready()
    children = psutil.Process(platform.process.pid).children(recursive=True)
    platform.process.send_signal(signal.SIGKILL)
    platform.process.wait()
    gone = lambda: not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]  # noqa: E731
    assert eventually(gone, timeout_s=20)


def test_what_was_registered_is_there_after_a_restart(tmp_path: Path, tiny_model: Path) -> None:
    data = tmp_path / "data"
    with running(data) as platform, platform.client() as client:
        register(client, "tiny", tiny_model)
        before = client.function("tiny").remote("hi", max_tokens=4, temperature=0).text
    with running(data) as platform, platform.client() as client:
        assert [row["id"] for row in client.admin.list("models")] == ["tiny"]
        assert client.function("tiny").remote("hi", max_tokens=4, temperature=0).text == before

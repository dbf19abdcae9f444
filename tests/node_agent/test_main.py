"""Starting an agent that cannot start: one line, the cure, and an exit code."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

from tests.node_agent.conftest import Agent, FakeController

COMMAND = [sys.executable, "-m", "nearline.node_agent", "--controller", "http://127.0.0.1:9", "--pool-bytes", "32MiB"]


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_a_busy_port_is_named_with_the_cure(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = start("--data-dir", str(tmp_path), "--port", str(port), "--prewarm", "0")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert str(port) in last
    assert "--port" in last
    assert "Traceback" not in done.stderr


def test_a_data_dir_that_cannot_be_is_named_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    done = start("--data-dir", str(tmp_path / "file" / "node"))
    assert done.returncode == 1
    assert "--data-dir" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    done = start("--data-dir", str(tmp_path), "--kv-bytes", "plenty")
    assert done.returncode == 2
    assert "2GiB" in done.stderr


async def test_a_second_agent_on_the_same_directory_is_told_who_has_it(agent: Agent, data_dir: Path) -> None:
    done = await asyncio.to_thread(start, "--data-dir", str(data_dir))
    assert done.returncode == 1
    assert f"process {agent.process.pid}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


async def test_a_node_keeps_its_name(controller: FakeController, agent: Agent, data_dir: Path) -> None:
    report = await controller.report()
    assert (data_dir / "node_id").read_text().strip() == report.node_id
    assert report.http_url.startswith("http://127.0.0.1:")

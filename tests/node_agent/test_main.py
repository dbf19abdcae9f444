"""Starting an agent that cannot start: one line, the cure, and an exit code."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nearline.node_agent.data_dir import locked_data_dir
from tests.node_agent.conftest import Agent, FakeController

COMMAND = [sys.executable, "-m", "nearline.node_agent", "--controller", "http://127.0.0.1:9", "--pool-bytes", "32MiB"]


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=180, check=False)


def test_a_busy_port_is_named_with_the_cure(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = start("--data-dir", str(tmp_path), "--port", str(port), "--prewarm", "0")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert str(port) in last
    assert "--port" in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("url", "cure"),
    [("10.0.0.1:8000", "put http:// in front: http://10.0.0.1:8000"), ("ws://a", "only http:// and https:// will do")],
)
def test_a_controller_that_is_no_url_is_refused_at_once_with_the_cure(tmp_path: Path, url: str, cure: str) -> None:
    done = start("--data-dir", str(tmp_path / "node"), "--controller", url)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: nearline node ")
    assert cure in done.stderr
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize("flags", [[], ["--json-logs"]])
def test_a_logged_traceback_shows_no_secret(flags: list[str], tmp_path: Path) -> None:
    code = """
import sys, structlog
from nearline.node_agent import __main__ as main
options = main._parser().parse_args(sys.argv[1:])
main._configure_logging(options.json_logs)
def fail(config, token):
    raise RuntimeError("it broke")
try:
    fail(main._config(options), main.cluster_token(options.token_file, "--token-file"))
except RuntimeError:
    structlog.get_logger().exception("broken")
    structlog.get_logger().info("config", config=main._config(options))
"""
    (tmp_path / "token").write_text("cluster-secret")
    arguments = ["--controller", "http://x", "--data-dir", str(tmp_path), "--token-file", str(tmp_path / "token")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, *flags], capture_output=True, text=True, timeout=180, check=True
    )
    assert "it broke" in done.stderr
    assert "Traceback" in done.stderr
    assert "cluster-secret" not in done.stderr


def test_a_data_dir_that_cannot_be_is_named_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    done = start("--data-dir", str(tmp_path / "file" / "node"))
    assert done.returncode == 1
    assert "--data-dir" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("module", ["node_agent", "controller"])
def test_an_empty_token_opens_no_door(tmp_path: Path, module: str) -> None:
    """As a crash or a full disk left it."""
    (tmp_path / "token").write_text("")
    needed = {
        "node_agent": ["--controller", "http://127.0.0.1:9", "--token-file"],
        "controller": ["--redis", "unix:///none", "--node-token-file"],
    }
    command = [sys.executable, "-m", f"nearline.{module}", "--data-dir", str(tmp_path / "d"), *needed[module]]
    done = subprocess.run([*command, str(tmp_path / "token")], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 1
    assert f"{tmp_path / 'token'} is empty" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    done = start("--data-dir", str(tmp_path), "--kv-bytes", "plenty")
    assert done.returncode == 2
    assert "2GiB" in done.stderr


def test_a_full_disk_keeps_no_agent_from_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with locked_data_dir(tmp_path) as path:
        assert path == tmp_path


async def test_a_second_agent_on_the_same_directory_is_told_who_has_it(agent: Agent, data_dir: Path) -> None:
    done = await asyncio.to_thread(start, "--data-dir", str(data_dir))
    assert done.returncode == 1
    assert f"process {agent.process.pid}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


async def test_a_node_keeps_its_name(controller: FakeController, agent: Agent, data_dir: Path) -> None:
    report = await controller.report()
    assert (data_dir / "node_id").read_text().strip() == report.node_id
    assert report.http_url.startswith("http://127.0.0.1:")

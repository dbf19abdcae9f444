"""`nearline top` and `nearline logs`: watching the fleet and reading what its processes wrote."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nearline.client.commands.logs import last_lines, log_files, show
from nearline.client.processes import Child
from nearline.protocol.log_files import older
from tests.client.conftest import Server
from tests.client.test_cli import nearline

FLEET: dict[str, Any] = {
    "version": "9.9.9",
    "models": [
        {"id": "m", "num_instances": 1, "num_missing": 0},
        {"id": "quiet", "num_instances": 0, "num_missing": 2, "missing_because": "its node has no free slot"},
    ],
    "instances": [
        {
            "id": "i-1", "model": "m", "state": "ready", "node": "n", "num_running": 3, "num_waiting": 0,
            "kv_tokens_used": 70, "kv_tokens_total": 512, "num_adapters": 0, "expires_in_s": None,
        }
    ],
    "queues": [],
    "nodes": [],
}  # fmt: skip


def test_top_into_a_pipe_shows_everything_once(server: Server) -> None:
    async def fleet(request: web.Request) -> web.StreamResponse:
        assert request.path == "/admin/fleet"
        return web.json_response(FLEET)

    server.handler = fleet
    shown = nearline("top", url=server.url)
    assert shown.returncode == 0
    for text in (
        "9.9.9",
        "2 models, 1 of them up",
        "i-1",
        "70/512",
        "nobody waits",
        "no nodes",
        "2 of quiet's replicas are missing: its node",
    ):
        assert text in shown.stdout
    assert json.loads(nearline("top", "--json", url=server.url).stdout) == FLEET


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "node" / "logs").mkdir(parents=True)
    (tmp_path / "logs" / "controller.log").write_text("one\ntwo\nthree\n")
    for age, name in enumerate(("engine-2", "engine-1")):
        path = tmp_path / "node" / "logs" / f"{name}.log"
        path.write_text(f"{name} speaks\n")
        os.utime(path, (1000 - age, 1000 - age))
    return tmp_path


def test_logs_lists_processes_and_shows_the_last_lines_of_one(data_dir: Path) -> None:
    def logs(*arguments: str) -> Any:
        return nearline("logs", *arguments, "--data-dir", str(data_dir))

    assert logs().stdout.split() == ["controller", "engine-2", "engine-1"]
    assert logs("controller", "-n", "2").stdout == "two\nthree\n"
    assert json.loads(logs("engine-1", "--json").stdout) == ["engine-1 speaks"]
    unknown = logs("nobody", "--json")
    assert unknown.returncode == 1
    assert "engine-2" in json.loads(unknown.stdout)["error"]["message"]


def test_no_lines_and_bytes_that_are_no_text_are_fine(data_dir: Path) -> None:
    assert last_lines(io.BytesIO(b"one\ntwo\n"), 0) == ""
    assert last_lines(io.BytesIO(b"\xff\xfe end\n"), 5).endswith(" end\n")
    assert log_files(data_dir / "nowhere") == {}


def test_following_goes_on_in_the_file_that_takes_the_place_of_a_full_one(data_dir: Path) -> None:
    path = data_dir / "logs" / "controller.log"
    command = [sys.executable, "-m", "nearline", "logs", "controller", "-f", "-n", "1"]
    command = [*command, "--data-dir", str(data_dir)]
    # A suite that runs in the background of a shell ignores Ctrl-C, and its children with it.
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, heeded)
        assert process.stdout is not None
        assert process.stdout.readline() == "three\n"
        with path.open("a") as file:
            file.write("four\n")
        assert process.stdout.readline() == "four\n"
        path.rename(path.with_suffix(".log.old"))
        path.write_text("five\n")
        assert process.stdout.readline() == "five\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130


def test_following_misses_nothing_of_a_log_that_is_cut_while_its_process_writes(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`four` comes between the last look and the cut, `five` after it."""
    child = Child("controller", [], data_dir / "logs" / "controller.log")
    monkeypatch.setattr("nearline.client.processes.MAX_SERVICE_LOG_BYTES", 10)
    with child.log.open("a", buffering=1) as writer:

        def turns() -> Iterator[None]:
            writer.write("four\n")
            child.cut_log()
            yield
            writer.write("five\n")
            yield
            raise KeyboardInterrupt

        passing = turns()
        monkeypatch.setattr("nearline.client.commands.logs.time.sleep", lambda _: next(passing))
        with pytest.raises(KeyboardInterrupt):
            show(child.log, 1, follow=True)
    assert capsys.readouterr().out == "three\nfour\nfive\n"
    assert (child.log.read_text(), older(child.log).read_text()) == ("five\n", "one\ntwo\nthree\nfour\n")


def test_following_outlasts_the_moment_in_which_a_full_file_is_gone_and_the_next_not_there_yet(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, stat = data_dir / "logs" / "controller.log", Path.stat
    looks = iter(["there", "gone", "there again"])

    def looked_at(self: Path, **options: bool) -> os.stat_result:
        look = next(looks) if self == path else ""
        if look == "gone":
            raise FileNotFoundError(path)
        if look == "there again":
            raise KeyboardInterrupt
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", looked_at)
    with pytest.raises(KeyboardInterrupt):
        show(path, 1, follow=True)
    assert capsys.readouterr().out == "three\n"

"""The controller as a process: started, refused, killed, replaced, asked to stop."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nearline.controller.__main__ import main
from nearline.controller.service import _drain, stop_signal
from tests.controller.conftest import Valkey, wait_for_exit

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(valkey: Valkey, prefix: str, tmp_path: Path) -> Iterator[Start]:
    running: list[subprocess.Popen[bytes]] = []

    def begin(name: str, *flags: str, redis: str = valkey.url, port: int = 0) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "nearline.controller", "--redis", redis, "--key-prefix", prefix]
        command += [
            "--data-dir",
            str(tmp_path / name),
            "--port",
            str(port),
            "--url-file",
            str(tmp_path / f"{name}.url"),
        ]
        with (tmp_path / f"{name}.log").open("wb") as log:
            running.append(subprocess.Popen([*command, *flags], stdout=log, stderr=log))
        return running[-1]

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()


def url_of(tmp_path: Path, name: str, timeout_s: float = 90) -> str:
    path = tmp_path / f"{name}.url"
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists():
            return path.read_text().strip()
        time.sleep(0.02)
    raise AssertionError((tmp_path / f"{name}.log").read_text())


def get(url: str | urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def log_of(tmp_path: Path, name: str) -> str:
    return (tmp_path / f"{name}.log").read_text()


def test_a_controller_starts_tells_its_address_and_stops_when_asked(start: Start, tmp_path: Path) -> None:
    process = start("one")
    url = url_of(tmp_path, "one")
    assert get(f"{url}/health/live")[0] == 200
    status, body = get(f"{url}/health/ready")
    assert (status, body["checks"]) == (503, {"redis": True, "leader": True, "node": False})
    process.send_signal(signal.SIGTERM)
    assert wait_for_exit(process) == 0
    assert not (tmp_path / "one.url").exists()


async def test_asked_a_second_time_it_waits_for_no_request() -> None:
    looks: list[int] = []

    def busy() -> dict[str, Any]:
        looks.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        return {"models": [{"num_running": 1, "num_waiting": 0}]}

    await _drain(SimpleNamespace(runtime=SimpleNamespace(snapshot=busy)), stop_signal())  # type: ignore[arg-type]
    assert len(looks) < 10, "eight seconds are more than a hundred looks"


@pytest.mark.parametrize(("host", "status"), [("0.0.0.0", 200), ("::", 200), ("127.0.0.1", 403), ("localhost", 403)])
def test_the_address_it_tells_is_one_where_it_answers_and_open_to_others_it_has_any_name(
    start: Start, tmp_path: Path, host: str, status: int
) -> None:
    if ":" in host and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6")
    start("one", "--host", host)
    url = url_of(tmp_path, "one")
    assert get(f"{url}/health/live")[0] == 200
    assert get(urllib.request.Request(f"{url}/v1/models", headers={"Host": "gpu1.lan:8000"}))[0] == status


def test_without_keys_it_answers_to_the_machines_name_and_to_those_that_it_was_told(
    start: Start, tmp_path: Path
) -> None:
    start("one", "--allow-host", "Models.Example", "--allow-host", "host.docker.internal")
    url = url_of(tmp_path, "one")
    for host in (socket.gethostname(), "models.example", "host.docker.internal:8000"):
        assert get(urllib.request.Request(f"{url}/v1/models", headers={"Host": host}))[0] == 200, host
    assert get(urllib.request.Request(f"{url}/v1/models", headers={"Host": "other.example"}))[0] == 403


def test_a_standby_takes_over_from_a_killed_leader(start: Start, tmp_path: Path) -> None:
    leader = start("one")
    url_of(tmp_path, "one")
    start("two")
    deadline = time.monotonic() + 90
    while "waiting until its lease is free" not in log_of(tmp_path, "two"):
        assert time.monotonic() < deadline, log_of(tmp_path, "two")
        time.sleep(0.1)
    assert not (tmp_path / "two.url").exists()
    leader.kill()
    leader.wait()
    assert get(f"{url_of(tmp_path, 'two')}/health/live")[0] == 200


def test_a_busy_port_is_one_clear_line(start: Start, tmp_path: Path, prefix: str) -> None:
    start("one")
    port = int(url_of(tmp_path, "one").rsplit(":", 1)[1])
    second = start("two", "--key-prefix", f"{prefix}other:", port=port)
    assert wait_for_exit(second) == 1
    last = log_of(tmp_path, "two").strip().splitlines()[-1]
    assert last.startswith(f"nearline controller: port {port} on 127.0.0.1 is in use")


@pytest.mark.slow
def test_an_unreachable_redis_is_one_clear_line(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start("one", redis="unix:///nowhere/at/all.sock")
    assert wait_for_exit(process) == 1
    assert "(Redis) does not answer" in log_of(tmp_path, "one").strip().splitlines()[-1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_data_directory_is_one_clear_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir(mode=0o500)
    assert wait_for_exit(start("one")) == 1
    assert "cannot write" in log_of(tmp_path, "one")


def test_a_data_directory_that_is_a_file_is_one_clear_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("")
    assert wait_for_exit(start("one")) == 1
    assert "choose another --data-dir" in log_of(tmp_path, "one").strip().splitlines()[-1]


@pytest.mark.parametrize("pair", ["acme", "acme=0", "acme=-1", "acme=much", "=2", "acme=inf"])
def test_a_weight_that_is_none_is_one_clear_line(pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--redis", "unix:///nowhere", "--data-dir", str(tmp_path), "--tenant-weight", pair]
    assert main(arguments) == 1
    assert "NAME=W" in capsys.readouterr().err

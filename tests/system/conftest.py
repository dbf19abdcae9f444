"""A whole platform in processes of its own, as a user starts it."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from nearline.client import Client
from nearline.protocol.errors import NearlineError

START_TIMEOUT_S = 180.0


@dataclass
class RunningPlatform:
    """`nearline up` as a child of the test."""

    data_dir: Path
    process: subprocess.Popen[bytes]
    url: str = ""

    def client(self) -> Client:
        return Client(self.url)

    def pids(self, module: str) -> list[int]:
        """Process ids below `up` whose command line names `module`."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if module in " ".join(process.cmdline()):
                        found.append(process.pid)
        return found

    def kill(self, module: str) -> None:
        """kill -9 every process of `module`."""
        for pid in self.pids(module):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).send_signal(signal.SIGKILL)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        url_file = self.data_dir / "run" / "controller.url"
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"`nearline up` ended: {self.logs()}"
            if url_file.exists() and url_file.read_text().strip():
                self.url = url_file.read_text().strip()
                with contextlib.suppress(NearlineError), self.client() as client:
                    if client.admin.is_ready():
                        return
            time.sleep(0.05)
        raise AssertionError(f"the platform is not ready after {START_TIMEOUT_S} s: {self.logs()}")

    def logs(self) -> str:
        tails = [f"--- {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in self.data_dir.glob("logs/*.log")]
        return "\n".join(tails)

    def stop(self, timeout_s: float = 90.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=timeout_s)


def start_platform(data_dir: Path, *flags: str) -> RunningPlatform:
    command = [sys.executable, "-m", "nearline", "up", "--data-dir", str(data_dir), "--port", "0"]
    command += ["--pool", "256MiB", "--slots", "2", "--prewarm", "1", *flags]
    data_dir.mkdir(parents=True, exist_ok=True)
    with (data_dir / "up.out").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    return RunningPlatform(data_dir, process)


@contextlib.contextmanager
def running(data_dir: Path, *flags: str) -> Iterator[RunningPlatform]:
    platform = start_platform(data_dir, *flags)
    try:
        platform.wait_ready()
        yield platform
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            platform.stop()
        if platform.process.poll() is None:
            platform.process.kill()


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    """One platform for all tests that leave it as they found it."""
    with running(tmp_path_factory.mktemp("nl") / "data") as started:
        yield started


@pytest.fixture
def own_platform(tmp_path: Path) -> Iterator[RunningPlatform]:
    """A platform for one test that will hurt it."""
    with running(tmp_path / "data") as started:
        yield started


def register(client: Client, name: str, source: Path, **options: object) -> dict[str, object]:
    """Register a model (or with base=…, an adapter); return what the platform says of it."""
    kind = "adapters" if "base" in options else "models"
    *_, registered = client.admin.add(kind, {"name": name, "source": str(source), **options})
    return registered


@pytest.fixture(scope="session")
def tiny_model(tiny_llama_dir: Callable[..., Path]) -> Path:
    """Tiny, float32, with room for long answers."""
    return tiny_llama_dir(seed=1, max_position_embeddings=4096)


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False

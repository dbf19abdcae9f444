"""The whole platform on one machine: Valkey, controller and node agent under one supervisor (`nearline up`)."""

import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from nearline.client.config import short_runtime_dir
from nearline.client.processes import Child
from nearline.client.valkey import valkey_command
from nearline.protocol.errors import Fault, InvalidRequest
from nearline.protocol.secret_files import write_secret

START_TIMEOUT_S = 60.0
POLL_S = 0.02
LOG_CHECK_S = 5.0
STOP_GRACE_S = 10.0
QUIET_STOP_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformConfig:
    """`redis_url` None starts the embedded Valkey. `api_keys` are NAME=KEY lines; `agent_args` go to the node agent
    and `controller_args` to the controller as they are."""

    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    redis_url: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    agent_args: tuple[str, ...] = ()
    controller_args: tuple[str, ...] = ()


@dataclass(slots=True)
class Platform:
    """What runs. `url` is where the front door answers."""

    config: PlatformConfig
    url: str = ""
    children: list[Child] = field(default_factory=list)

    @property
    def logs(self) -> Path:
        return self.config.data_dir / "logs"


@asynccontextmanager
async def running_platform(config: PlatformConfig, say: Callable[[str], None]) -> AsyncIterator[Platform]:
    """Start everything, yield when requests can be served, and leave nothing behind.

    Raises InvalidRequest when the data directory is in use, Fault when a part does not come up.
    """
    platform = Platform(config)
    with _data_dir_lock(config.data_dir):
        sockets = short_runtime_dir(config.data_dir, "run")
        shutil.rmtree(sockets, ignore_errors=True)
        keepers: list[asyncio.Task[None]] = []
        try:
            await _start_all(platform, sockets, keepers, say)
            yield platform
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await _stop_all(platform.children, say)
            shutil.rmtree(sockets, ignore_errors=True)


async def _start_all(
    platform: Platform, sockets: Path, keepers: list[asyncio.Task[None]], say: Callable[[str], None]
) -> None:
    config, data = platform.config, platform.config.data_dir
    _check_port(config)
    redis_url = config.redis_url
    if redis_url is None:
        path = sockets / "valkey.sock"
        redis_url = f"unix://{path}"
        store = Child("valkey", valkey_command(data / "valkey", path), platform.logs / "valkey.log")
        await _start(platform, store, path.exists)
        say("valkey     up (append-only, embedded)")
    token = data / "node.token"
    if not token.exists():
        write_secret(token, secrets.token_urlsafe(32))
    url_file = sockets / "controller.url"
    sockets.mkdir(parents=True, exist_ok=True)
    python = [sys.executable, "-m"]
    controller = Child(
        "controller",
        [*python, "nearline.controller", "--host", config.host, "--port", str(config.port), "--redis", redis_url,
         "--data-dir", str(data / "controller"), "--node-token-file", str(token), "--url-file", str(url_file),
         *_api_key_args(data, config.api_keys), *config.controller_args],
        platform.logs / "controller.log",
    )  # fmt: skip
    await _start(platform, controller, lambda: url_file.exists() and bool(url_file.read_text().strip()))
    platform.url = url_file.read_text().strip()
    # A restarted controller must come back where its clients and agents look for it.
    controller.command[controller.command.index("--port") + 1] = platform.url.rsplit(":", 1)[1]
    say(f"controller up at {platform.url}")
    agent = Child(
        "node_agent",
        [*python, "nearline.node_agent", "--controller", platform.url, "--data-dir", str(data / "node"),
         "--token-file", str(token), "--host", config.host, *config.agent_args],
        platform.logs / "node_agent.log",
    )  # fmt: skip
    await _start(platform, agent, lambda: True)
    keepers += [asyncio.create_task(child.keep_running(_restart_notice(say))) for child in platform.children]
    keepers.append(asyncio.create_task(_keep_logs_small(platform.children)))


async def _stop_all(children: list[Child], say: Callable[[str], None]) -> None:
    """The controller first: the requests that it lets finish need their nodes. Asked again, it lets none."""
    controller = next((child for child in children if child.name == "controller"), None)
    if controller is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, controller.terminate)
        stopping = asyncio.create_task(controller.stop(STOP_GRACE_S))
        if not (await asyncio.wait({stopping}, timeout=QUIET_STOP_S))[0]:
            say("letting requests finish; Ctrl-C again ends at once")
        await stopping
    for child in reversed(children):
        await child.stop(STOP_GRACE_S)


async def _keep_logs_small(children: list[Child]) -> None:
    while True:
        for child in children:
            child.cut_log()
        await asyncio.sleep(LOG_CHECK_S)


def _restart_notice(say: Callable[[str], None]) -> Callable[[Child], None]:
    return lambda child: say(f"{child.name} ended; starting it again")


def _check_port(config: PlatformConfig) -> None:
    """Say at once, before anything starts, that somebody else listens there."""
    if config.port:
        try:
            socket.create_server((config.host, config.port)).close()
        except OSError as error:
            where = f"{config.host}:{config.port}"
            why = (error.strerror or str(error)).partition(" (while")[0]  # what follows is in Python's words
            cure = "--port" if error.errno == errno.EADDRINUSE else "--host or --port"
            raise InvalidRequest(f"cannot listen on {where}: {why}; choose another {cure}") from None


async def _start(platform: Platform, child: Child, is_up: Callable[[], bool]) -> None:
    platform.children.append(child)
    await child.start()
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not is_up():
                if not child.is_running:
                    raise Fault(f"{child.name} did not start:\n{child.log_tail()}")
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise Fault(f"{child.name} did not come up in {START_TIMEOUT_S:.0f} s; see {child.log}") from None


@contextlib.contextmanager
def _data_dir_lock(data_dir: Path) -> Iterator[TextIO]:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = (data_dir / "up.lock").open("a+")
    except OSError as error:
        raise InvalidRequest(
            f"cannot use data directory {data_dir}: {error.strerror}; choose another with --data-dir"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise InvalidRequest(
                f"{data_dir} is in use by another `nearline up` (pid {owner}); stop it or choose another --data-dir"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield lock


def _api_key_args(data_dir: Path, api_keys: tuple[str, ...]) -> list[str]:
    """Hand the keys over in a file: a command line is readable by every user of the machine."""
    path = data_dir / "api-keys"
    path.unlink(missing_ok=True)
    if not api_keys:
        return []
    write_secret(path, "\n".join(api_keys) + "\n")
    return ["--api-key-file", str(path)]

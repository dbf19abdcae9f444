"""The controller as a service: everything put together, started in order, and taken down in order."""

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Container, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from nearline.controller.config import CoreConfig, RuntimeConfig
from nearline.controller.durable.job_worker import JobWorker
from nearline.controller.durable.jobs import JobStore
from nearline.controller.durable.lease import LeaderLease
from nearline.controller.durable.limits import Limits
from nearline.controller.durable.redis_state import DEFAULT_PREFIX, State
from nearline.controller.durable.registry import Registry
from nearline.controller.http.app import SHUTDOWN_S, create_app
from nearline.controller.http.door import Door
from nearline.controller.http.jobs_api import run_job
from nearline.controller.http.server import Runner
from nearline.controller.metrics import Metrics
from nearline.controller.runtime import Runtime
from nearline.controller.tenants import Tenants
from nearline.controller.text.models import TextModels
from nearline.protocol import Digest, TenantId
from nearline.protocol.errors import Fault, InvalidRequest, NearlineError, StateUnavailable
from nearline.protocol.options import is_loopback

CONNECT_LIMIT_S = 10.0
NUM_PRELOADED_TEXTS = 8
TEXT_SWEEP_S = 60.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """Where the controller listens and keeps its things. Keys and tokens are secrets and never logged. `host_names` are
    names it answers to without keys, though only this machine can reach it."""

    redis_url: str = field(repr=False)
    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    host_names: tuple[str, ...] = ()
    url_file: Path | None = None
    node_token: str = field(default="", repr=False)
    tenants: Tenants = field(default_factory=Tenants)
    key_prefix: str = DEFAULT_PREFIX
    max_running_jobs: int = 32
    result_ttl_s: float = 86_400.0
    tenant_weights: tuple[tuple[TenantId, float], ...] = ()
    limits: Limits = field(default_factory=Limits)
    solver_limit_s: float = 1.0


async def serve(config: ServiceConfig) -> None:
    """Run until SIGTERM or SIGINT. Raises NearlineError when the start fails or another controller takes over."""
    stop = stop_signal()
    _check_data_dir(config.data_dir)
    async with AsyncExitStack() as stack:
        state = State(config.redis_url, config.key_prefix)
        stack.push_async_callback(state.close)
        await _connect(state)
        lease = LeaderLease(state)
        if not await _until(stop, lease.acquire()):
            return
        stack.push_async_callback(_release, lease)
        runtime, door = _assemble(config, state, lease)
        runner = Runner(create_app(door, runtime.serve_node), shutdown_timeout=1.0, access_log=None)
        await runner.setup()
        stack.push_async_callback(door.limits.meter.settled)
        # Below the runtime on the stack: when that ends, open streams get its error frame before their sockets close.
        stack.push_async_callback(runner.cleanup)
        await stack.enter_async_context(runtime)
        await _load(door)
        await _Front(config, door, runner, stop, runtime.core.fleet.references.counts).run()


def _assemble(config: ServiceConfig, state: State, lease: LeaderLease) -> tuple[Runtime, Door]:
    metrics = Metrics()
    runtime_config = RuntimeConfig(
        core=CoreConfig(
            epoch=str(lease.token), tenant_weights=config.tenant_weights, solver_limit_s=config.solver_limit_s
        ),
        node_token=config.node_token,
        fencing_token=lease.token,
        deployment=lease.deployment,
        journal_directory=str(config.data_dir / "journal"),
    )
    runtime = Runtime(runtime_config, on_started=metrics.started)
    registry = Registry(state, lease.token)
    texts = TextModels(config.data_dir / "text", runtime.fetch_file)
    jobs = JobStore(state, config.result_ttl_s)
    keepers = (registry, texts, jobs, state, lease, metrics, config.tenants, config.limits)
    names = frozenset((socket.gethostname().lower(), *config.host_names))
    return runtime, Door(runtime, *keepers, is_loopback=is_loopback(config.host), host_names=names)


async def _load(door: Door) -> None:
    """Give the fleet everything that Redis remembers."""
    await door.registry.load()
    for model in door.registry.models.values():
        door.runtime.add_model(model)
    for adapter in door.registry.adapters.values():
        door.runtime.add_adapter(adapter)
    door.runtime.registry_loaded(door.registry.checkpoints)
    log.info("registry_loaded", num_models=len(door.registry.models), num_adapters=len(door.registry.adapters))


class _Front:
    """Listens, works on jobs and keeps the lease until told to stop. Owns: those tasks. `needed` are the checkpoints
    that names and requests need at any time."""

    def __init__(
        self, config: ServiceConfig, door: Door, runner: web.AppRunner, stop: asyncio.Event, needed: Container[Digest]
    ) -> None:
        self._needed = needed
        self._config = config
        self._door = door
        self._runner = runner
        self._stop = stop
        self._failures: list[str] = []

    async def run(self) -> None:
        """Raises InvalidRequest when the port cannot be had, Fault when something vital ended."""
        config, door = self._config, self._door
        site = web.TCPSite(self._runner, config.host, config.port, backlog=1024)
        await _listen(site, config)
        log.info("front_door_open", url=_write_url(self._runner, config))
        run = partial(run_job, door)
        consumer = f"controller-{door.lease.token}"
        worker = JobWorker(door.state, door.jobs, run, consumer, config.max_running_jobs)
        keepers = [self._start("lease", door.lease.keep(self._lost)), self._start("job news", door.jobs.listen())]
        workers = [self._start("job worker", worker.serve()), self._start("texts", _tend_texts(door, self._needed))]
        try:
            await self._stop.wait()
            is_urged = stop_signal()
            log.info("stopping", reason=self._failures[0] if self._failures else "asked to")
            await site.stop()
            await _cancel(workers)
            if not self._failures:
                await _drain(door, is_urged)
        finally:
            await _cancel([*keepers, *workers])
            if config.url_file is not None:
                config.url_file.unlink(missing_ok=True)
        if self._failures:
            raise Fault(self._failures[0])

    def _start(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """A vital task that falls over takes the process down: whoever supervises it starts a clean one."""
        if not task.cancelled() and task.exception() is not None:
            self._failures.append(f"{task.get_name()} failed: {task.exception()!r}")
            self._stop.set()

    def _lost(self) -> None:
        self._failures.append("another controller has taken over the lease on this Redis")
        self._stop.set()


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(door: Door, is_urged: asyncio.Event) -> None:
    """Let requests under way finish, for a while, or until somebody asks a second time."""
    deadline = asyncio.get_running_loop().time() + SHUTDOWN_S
    while asyncio.get_running_loop().time() < deadline and not is_urged.is_set():
        if not any(row["num_running"] + row["num_waiting"] for row in door.runtime.snapshot()["models"]):
            return
        await asyncio.sleep(0.05)


async def _tend_texts(door: Door, needed: Container[Digest]) -> None:
    """Keep the tokenizers that are `needed`, and no others."""
    await _preload_texts(door)
    while True:
        try:
            await door.texts.sweep(needed)
        except OSError as error:
            log.warning("texts_not_swept", error=str(error))
        await asyncio.sleep(TEXT_SWEEP_S)


async def _preload_texts(door: Door) -> None:
    """Have the tokenizers of the newest models ready before the first request needs them."""
    newest = sorted(door.registry.models.values(), key=lambda spec: -spec.created_at)
    for spec in newest[:NUM_PRELOADED_TEXTS]:
        try:
            await door.texts.preload(spec.checkpoint)
        except Exception as error:  # no node yet, or a torn file: the first request will fetch it, or say it
            log.info("text_not_preloaded", model=spec.model_id, error=repr(error))


async def _listen(site: web.TCPSite, config: ServiceConfig) -> None:
    try:
        await site.start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"port {config.port} on {config.host} is in use; stop what listens there or choose another --port"
        else:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            text = f"cannot listen on {config.host}:{config.port}: {why}; choose another --host or --port"
        raise InvalidRequest(text) from None


def _write_url(runner: web.AppRunner, config: ServiceConfig) -> str:
    port = runner.addresses[0][1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if config.url_file is not None:
        incoming = config.url_file.with_name(f".{config.url_file.name}.{os.getpid()}")
        incoming.write_text(url + "\n")
        incoming.replace(config.url_file)
    return url


def _check_data_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # what is there can be served; what needs room says so itself
            log.warning("disk_full", path=str(path), error=error.strerror)
            return
        raise InvalidRequest(f"cannot write to {path}: {error.strerror}; choose another --data-dir") from None


async def _connect(state: State) -> None:
    """Wait for Redis, which may be starting too."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CONNECT_LIMIT_S
    while True:
        try:
            await state.ping()
            return
        except StateUnavailable as error:
            if loop.time() >= deadline:
                raise StateUnavailable(f"{error.message} (waited {CONNECT_LIMIT_S:g} s; is --redis right?)") from None
            await asyncio.sleep(0.2)


def stop_signal() -> asyncio.Event:
    """An event that the next SIGTERM or SIGINT sets, and no longer an earlier one."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    """Do the work unless told to stop first; whether it was done. Raises what the work raises."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        await _cancel([task])
        return False
    await task
    return True


async def _release(lease: LeaderLease) -> None:
    with suppress(NearlineError):
        await lease.release()

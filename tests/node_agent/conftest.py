"""A controller that only listens and commands, a real agent process, and a tiny checkpoint in its store."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import WSMsgType, web

from nearline.protocol import (
    CheckpointInfo,
    Digest,
    InstanceId,
    InstanceSpec,
    InstanceState,
    InstanceStatus,
    MessageCodec,
    ModelId,
    NodeReport,
    Request,
    RequestId,
    SamplingParams,
    SequenceUpdate,
    encode,
    from_plain,
)
from nearline.protocol.frames import (
    EnsureInstance,
    InstanceChanged,
    Report,
    StopInstance,
    Submit,
    ToController,
    Tokens,
    Welcome,
)

STAND_IN = shlex.join((sys.executable, str(Path(__file__).with_name("stand_in_engine.py"))))
TOKEN = "cluster-secret"
WAIT_S = 90.0
"""Only ends a hang: what is waited for comes at once, or late on a busy machine."""


@pytest.fixture(scope="session")
def stored_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Callable[..., Path]
) -> tuple[CheckpointInfo, Path]:
    """A tiny Llama imported by the real importer: its description, and the store directory that holds it."""
    root = tmp_path_factory.mktemp("store")
    command = [sys.executable, "-m", "nearline.checkpoint_store", "import", "--root", str(root)]
    command += ["--kind", "model", "--source", str(tiny_llama_dir())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return from_plain(CheckpointInfo, json.loads(done.stdout.splitlines()[-1])["checkpoint"]), root


@pytest.fixture
def data_dir(tmp_path: Path, stored_checkpoint: tuple[CheckpointInfo, Path]) -> Path:
    """A data directory whose store holds the tiny checkpoint."""
    info, root = stored_checkpoint
    directory = tmp_path / "node"
    held = directory / "store" / "checkpoints" / info.digest
    shutil.copytree(root / "checkpoints" / info.digest, held)
    return directory


class FakeController:
    """Speaks the controller's side of the link and remembers everything it hears. `restart` keeps the port."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = 0
        self.heard: list[Any] = []
        self.num_links = 0
        self._news = asyncio.Condition()
        self._codec = MessageCodec(ToController)
        self._ws: web.WebSocketResponse | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/internal/node", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._ws:
            await self._ws.close()
        assert self._runner
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized
        ws = self._ws = web.WebSocketResponse(max_msg_size=0)
        await ws.prepare(request)
        self.num_links += 1
        is_welcomed = False
        async for message in ws:
            assert message.type is WSMsgType.BINARY
            frame = self._codec.decode(message.data)
            async with self._news:
                self.heard.append(frame)
                self._news.notify_all()
            if not is_welcomed:
                assert isinstance(frame, Report)
                is_welcomed = True
                await ws.send_bytes(encode(Welcome(0.2, 1)))
        return ws

    async def send(self, frame: object) -> None:
        assert self._ws
        await self._ws.send_bytes(encode(frame))

    async def hear(self, wanted: Callable[[Any], Any], timeout_s: float = WAIT_S, since: int = 0) -> Any:
        """Wait for the first frame after `since` for which `wanted` gives something, and return what it gives."""
        async with asyncio.timeout(timeout_s), self._news:
            while True:
                for frame in self.heard[since:]:
                    found = wanted(frame)
                    if found:
                        return found
                await self._news.wait()

    # ---- what tests ask for ----

    async def ensure(self, instance_id: str, digest: Digest, model_id: str = "m") -> None:
        await self.send(EnsureInstance(InstanceSpec(InstanceId(instance_id), ModelId(model_id), digest)))

    async def state(self, instance_id: str, state: str, timeout_s: float = WAIT_S, since: int = 0) -> InstanceStatus:
        def wanted(frame: Any) -> InstanceStatus | None:
            is_it = isinstance(frame, InstanceChanged) and frame.status.instance_id == instance_id
            return frame.status if is_it and frame.status.state is InstanceState(state) else None

        status: InstanceStatus = await self.hear(wanted, timeout_s, since)
        return status

    async def stop_instance(self, instance_id: str, drain_s: float = 0.0) -> None:
        await self.send(StopInstance(InstanceId(instance_id), drain_s))

    async def submit(self, instance_id: str, request_id: str, max_tokens: int = 5, **fields: Any) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(RequestId(request_id), ModelId("m"), (1, 2, 3), sampling, **fields)
        await self.send(Submit(InstanceId(instance_id), request, attempt=0))

    def updates(self, request_id: str) -> list[SequenceUpdate]:
        frames = [f for f in self.heard if isinstance(f, Tokens)]
        return [u for f in frames for u in f.updates if u.request_id == request_id]

    async def finished(self, request_id: str) -> list[SequenceUpdate]:
        """Wait for a sequence's end; give all its updates."""

        def wanted(frame: Any) -> bool:
            return isinstance(frame, Tokens) and any(
                u.request_id == request_id and u.finish_reason is not None for u in frame.updates
            )

        await self.hear(wanted)
        return self.updates(request_id)

    async def report(
        self, wanted: Callable[[NodeReport], bool] = lambda _: True, timeout_s: float = WAIT_S
    ) -> NodeReport:
        """Wait for a fresh report of which `wanted` is true."""
        since = len(self.heard)
        found: NodeReport = await self.hear(
            lambda f: f.report if isinstance(f, Report) and wanted(f.report) else None, timeout_s, since
        )
        return found


class Agent:
    """A real agent process."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.process = process
        self.log_path = log_path

    def engines(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if any("engine" in word for word in child.cmdline())]

    async def terminate(self, timeout_s: float = WAIT_S) -> int:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()

    def log(self) -> str:
        return self.log_path.read_text()


@asynccontextmanager
async def running_agent(
    controller: FakeController, data_dir: Path, *extra: str, engine: str | None = STAND_IN
) -> AsyncIterator[Agent]:
    """Start an agent and wait for its link; whatever happens, nothing of it is left."""
    token = data_dir.parent / "token"
    token.write_text(TOKEN + "\n")
    command = [
        sys.executable,
        "-m",
        "nearline.node_agent",
        "--controller",
        f"http://{controller.host}:{controller.port}",
    ]
    command += ["--data-dir", str(data_dir), "--token-file", str(token), "--pool-bytes", "64MiB", "--json-logs"]
    command += ["--engine-command", engine] if engine else []
    log_path = data_dir.parent / "agent.log"
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, *extra, stderr=log, start_new_session=True)
    agent = Agent(process, log_path)
    try:
        yield agent
    finally:
        leftovers = agent.engines() if process.returncode is None else []
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
        for child in leftovers:
            if child.is_running():
                child.kill()


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    fake = FakeController()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def agent(controller: FakeController, data_dir: Path) -> AsyncIterator[Agent]:
    """An agent with stand-in engines, two slots, one process pre-warmed."""
    async with running_agent(controller, data_dir, "--slots", "2", "--prewarm", "1") as started:
        await controller.report(lambda r: r.num_prewarmed == 1)
        yield started

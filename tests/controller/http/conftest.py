"""The front door on loopback, over a scripted fleet and a real Valkey."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from nearline.controller.durable.job_worker import JobWorker
from nearline.controller.durable.jobs import JobStore
from nearline.controller.durable.lease import LeaderLease
from nearline.controller.durable.redis_state import State
from nearline.controller.durable.registry import Registry
from nearline.controller.http.app import Handler, create_app
from nearline.controller.http.door import Door
from nearline.controller.http.jobs_api import run_job
from nearline.controller.http.server import Runner
from nearline.controller.text.models import TextModels
from nearline.protocol import AdapterSpec, CheckpointInfo, CheckpointKind, Digest, ModelId, ModelSpec
from tests.conftest import CHATML
from tests.controller.http.scripted import EOS, ScriptedRuntime

CONTEXT = 64


def checkpoint(digest: str = "d0", kind: CheckpointKind = CheckpointKind.MODEL, **other: Any) -> CheckpointInfo:
    fields: dict[str, Any] = {
        "num_bytes": 1000, "family": "llama", "architecture": "LlamaForCausalLM", "source": "/models/tiny",
        "dtype": "float32", "files": ("tokenizer.json", "tokenizer_config.json"), "max_context_tokens": CONTEXT,
        "vocab_size": 272, "eos_token_ids": (EOS,), "bos_token_id": 256,
    }  # fmt: skip
    return CheckpointInfo(Digest(digest), kind, **(fields | other))


@pytest.fixture
def files(tiny_tokenizer_json: dict[str, Any]) -> dict[str, bytes]:
    config = {"chat_template": CHATML, "eos_token": "<|im_end|>", "bos_token": "<|bos|>", "add_bos_token": False}
    return {
        "tokenizer.json": json.dumps(tiny_tokenizer_json).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


@dataclass
class FrontDoor:
    """A running front door and everything behind it."""

    url: str
    door: Door
    runtime: ScriptedRuntime
    session: aiohttp.ClientSession
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        sent = {key.replace("_", "-"): value for key, value in headers.items()}
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        async with self.session.post(self.url + path, data=data, headers=sent) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None, response.headers

    async def get(self, path: str, **headers: str) -> tuple[int, Any, Any]:
        sent = {key.replace("_", "-"): value for key, value in headers.items()}
        async with self.session.get(yarl_raw(self.url + path), headers=sent) as response:
            return response.status, json.loads(await response.text()), response.headers

    async def events(self, path: str, body: Any) -> list[Any]:
        """The data frames of a stream; [DONE] as a string."""
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert response.headers["X-Accel-Buffering"] == "no"
            lines = (await response.text()).split("\n\n")
        frames = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [frame if frame == "[DONE]" else json.loads(frame) for frame in frames]


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        assert loop.time() < deadline
        await asyncio.sleep(0.01)


def yarl_raw(url: str) -> Any:
    from yarl import URL

    return URL(url, encoded=True)


async def serve(door: Door, runtime: ScriptedRuntime, node_handler: Handler | None = None) -> AsyncIterator[FrontDoor]:
    runner = Runner(create_app(door, node_handler), shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    worker = JobWorker(door.state, door.jobs, lambda job, started: run_job(door, job, started), "w1", lease_s=1.0)
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(door.jobs.listen()), asyncio.create_task(worker.serve())]
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session:
        yield FrontDoor(f"http://{host}:{port}", door, runtime, session, tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await runner.cleanup()


@pytest.fixture
async def make_door(state: State, files: dict[str, bytes], tmp_path: Path) -> Any:
    async def make(**options: Any) -> tuple[Door, ScriptedRuntime]:
        runtime = ScriptedRuntime(files)
        lease = LeaderLease(state)
        registry = Registry(state, await lease.acquire())
        await registry.put_model(ModelSpec(ModelId("tiny"), checkpoint(), 1.0))
        await registry.put_model(ModelSpec(ModelId("org/tiny:v1"), checkpoint(), 1.0))
        adapter = checkpoint("a0", CheckpointKind.ADAPTER, base_digest=Digest("d0"), rank=8, files=())
        await registry.put_adapter(AdapterSpec(ModelId("acme/pirate"), ModelId("tiny"), adapter, 2.0))
        texts = TextModels(tmp_path / "text", runtime.fetch_file)
        door = Door(runtime, registry, texts, JobStore(state), state, lease, **options)
        return door, runtime

    return make


@pytest.fixture
async def front(make_door: Any) -> AsyncIterator[FrontDoor]:
    door, runtime = await make_door(heartbeat_s=0.05)
    async for served in serve(door, runtime):
        yield served

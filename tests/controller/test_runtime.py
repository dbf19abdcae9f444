"""The runtime against a node agent on a real WebSocket: dispatch, stream, break, resume, end."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from nearline.controller.config import CoreConfig, RuntimeConfig
from nearline.controller.handle import RequestHandle
from nearline.controller.journal import digest, replay
from nearline.controller.runtime import Runtime
from nearline.protocol import (
    CheckpointKind,
    Digest,
    FinishReason,
    InstanceState,
    ModelId,
    NodeId,
    Request,
    RequestId,
    SamplingParams,
    StartTimings,
    Tier,
)
from nearline.protocol.errors import (
    CheckpointCorrupt,
    ErrorInfo,
    InstanceFailed,
    InvalidRequest,
    ModelNotFound,
    NodeLost,
    NotFound,
    StorageFull,
)
from nearline.protocol.frames import (
    CancelTask,
    DeleteCheckpoint,
    EnsureInstance,
    EvictCheckpoint,
    ImportCheckpoint,
    ImportFinished,
    Submit,
    TaskFailed,
    TaskProgress,
)
from tests.controller.fake_agent import FakeAgent
from tests.controller.fleets import TIMINGS, checkpoint, model, report, resident

TOKEN = "node-secret"


class Fleet:
    """A runtime behind a real HTTP server, and a way to dial it."""

    def __init__(self, runtime: Runtime, url: str, journal: Path, started: list[tuple[str, StartTimings]]) -> None:
        self.runtime = runtime
        self.url = url
        self.journal = journal
        self.started = started

    def agent(self, node_id: str = "n1", **settings: object) -> FakeAgent:
        return FakeAgent(self.url, report(node_id, 1, ["digest-of-a"], **settings), TOKEN)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    core = CoreConfig(epoch="t1", node_grace_s=2.0, start_backoff_s=0.05)
    config = RuntimeConfig(
        core=core, node_token=TOKEN, fencing_token=7, check_interval_s=0.05, journal_directory=str(tmp_path)
    )
    started: list[tuple[str, StartTimings]] = []
    async with Runtime(config, lambda model_id, timings: started.append((model_id, timings))) as runtime:
        app = web.Application()
        app.router.add_get("/internal/node", runtime.serve_node)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        runtime.add_model(model("a"))
        runtime.add_model(model("b"))
        url = f"http://127.0.0.1:{port}/internal/node"
        yield Fleet(runtime, url, tmp_path / "t1.000.journal", started)
        assert runtime.counters.num_core_errors == runtime.counters.num_check_failures == 0
        runtime.core.check()
    await runner.cleanup()


def request(name: str = "r1", max_tokens: int = 5, model_id: str = "a") -> Request:
    return Request(RequestId(name), ModelId(model_id), tuple(range(40)), SamplingParams(max_tokens=max_tokens))


async def collect(handle: RequestHandle) -> list[int]:
    tokens: list[int] = []
    last = None
    async for last in handle:
        tokens += last.token_ids
    assert last is not None
    assert last.finish_reason is FinishReason.LENGTH
    return tokens


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing tells of it; the timeout ends the wait
            await asyncio.sleep(0.005)


async def test_a_request_is_held_until_a_node_comes_and_then_streams_with_its_waterfall(fleet: Fleet) -> None:
    handle = fleet.runtime.open(request())
    assert handle.timings is None
    async with fleet.agent() as agent:
        assert await collect(handle) == [1000, 1001, 1002, 1003, 1004]
        assert agent.welcome is not None
        assert agent.welcome.fencing_token == 7
        times = handle.timings
        assert times is not None
        assert (times.is_cold, times.tier, times.read_s, times.bind_s) == (True, Tier.SSD, 0.5, 0.05)
        assert times.prefill_s == 0.004
        assert times.first_token_s is not None
        assert times.first_token_s >= times.queued_s >= 0
        warm = fleet.runtime.open(request("r2", 1))
        assert await collect(warm) == [1000]
        assert warm.timings is not None
        assert not warm.timings.is_cold


async def test_a_broken_link_does_not_break_the_stream(fleet: Fleet) -> None:
    async with fleet.agent() as agent:
        handle = fleet.runtime.open(request(max_tokens=60))
        for _ in range(5):
            await anext(handle)
            await agent.hang_up()
            await agent.dial()
        rest = await collect(handle)
        assert handle.generated_token_ids == [1000 + n for n in range(60)]
        assert rest == handle.generated_token_ids[-len(rest) :]
        submits = [frame for frame in agent.received if isinstance(frame, Submit)]
        assert [s.attempt for s in submits] == list(range(1, len(submits) + 1))
        assert all(s.generated_token_ids == tuple(1000 + n for n in range(len(s.generated_token_ids))) for s in submits)
        assert sum(isinstance(frame, EnsureInstance) for frame in agent.received) == 1


async def test_twenty_dead_engines_in_a_row_cost_no_token(fleet: Fleet) -> None:
    async with fleet.agent() as agent:
        handle = fleet.runtime.open(request(max_tokens=400))
        for attempt in range(1, 21):
            await eventually(lambda attempt=attempt: handle.attempt == attempt)  # type: ignore[misc]
            known = len(handle.generated_token_ids)
            await eventually(lambda known=known: len(handle.generated_token_ids) > known)  # type: ignore[misc]
            (instance_id,) = agent.instances
            await agent.change(instance_id, InstanceState.FAILED, error=ErrorInfo.of(InstanceFailed("killed")))
        await collect(handle)
        assert handle.generated_token_ids == [1000 + n for n in range(400)]
        assert handle.attempt == 21
    assert fleet.runtime.core.fleet.requests == {}


async def test_another_node_resumes_what_a_lost_node_had_begun(fleet: Fleet) -> None:
    async with fleet.agent("n1") as first:
        handle = fleet.runtime.open(request(max_tokens=200))
        await anext(handle)
        async with fleet.agent("n2") as second:
            await first.hang_up()
            await collect(handle)
            assert handle.generated_token_ids == [1000 + n for n in range(200)]
            assert any(isinstance(frame, Submit) and frame.generated_token_ids for frame in second.received)


async def test_cancelling_frees_the_sequence_on_the_node(fleet: Fleet) -> None:
    async with fleet.agent() as agent:
        async with fleet.runtime.open(request(max_tokens=10_000)) as handle:
            await anext(handle)
        await eventually(lambda: not agent.sequences)
        assert fleet.runtime.core.fleet.requests == {}
        held = fleet.runtime.open(request("held"))
        held.cancel()
        assert [update async for update in held] == []


async def test_refusals_are_raised_at_once_and_late_failures_from_the_stream(fleet: Fleet) -> None:
    with pytest.raises(ModelNotFound):
        fleet.runtime.open(request(model_id="zz"))
    async with fleet.agent() as agent:
        agent.load_s = 60.0  # it fails before
        handle = fleet.runtime.open(request())
        with pytest.raises(InvalidRequest, match="already in use"):
            fleet.runtime.open(request())
        for _ in range(3):
            await eventually(lambda: bool(agent.instances))
            (instance_id,) = agent.instances
            await agent.change(instance_id, InstanceState.FAILED, error=ErrorInfo.of(InstanceFailed("no device")))
            agent._reader.cancel()
            agent._reader = asyncio.create_task(agent._read())
        with pytest.raises(InstanceFailed, match="no device"):
            await anext(handle)


async def test_a_wrong_node_token_and_a_wrong_first_message_are_refused(fleet: Fleet) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await session.ws_connect(fleet.url, headers={"Authorization": "Bearer wrong"})
        socket = await session.ws_connect(fleet.url, headers={"Authorization": f"Bearer {TOKEN}"})
        await socket.send_bytes(b"hello")
        assert (await socket.receive()).data == 1002
    assert fleet.runtime.core.fleet.nodes == {}


async def test_an_import_reports_progress_and_its_end_or_its_error(fleet: Fleet) -> None:
    async with fleet.agent() as agent:
        await eventually(lambda: agent.welcome is not None)

        async def answer(*frames: object) -> None:
            await eventually(lambda: any(isinstance(f, ImportCheckpoint) for f in agent.received))
            for frame in frames:
                await agent.send(frame)

        def task_id() -> object:
            return next(f.task_id for f in agent.received if isinstance(f, ImportCheckpoint))

        stream = fleet.runtime.import_checkpoint(CheckpointKind.MODEL, "/models/x")
        first = asyncio.ensure_future(anext(stream))
        await answer()
        done = checkpoint("new-digest")
        await answer(TaskProgress(task_id(), "copy", 1, 2), ImportFinished(task_id(), done))
        assert (await first) == TaskProgress(task_id(), "copy", 1, 2)
        assert [item async for item in stream] == [ImportFinished(task_id(), done)]
        assert "new-digest" in fleet.runtime.core.fleet.nodes["n1"].residency
        agent.received.clear()
        failing = asyncio.ensure_future(anext(fleet.runtime.import_checkpoint(CheckpointKind.MODEL, "/models/x")))
        await answer()
        await answer(TaskFailed(task_id(), ErrorInfo.of(StorageFull("disk full"))))
        with pytest.raises(StorageFull):
            await failing


async def test_a_copy_that_describes_itself_otherwise_is_removed(
    fleet: Fleet,
) -> None:
    known = checkpoint("digest-of-a")
    settings: dict[str, Any] = {"source": "/elsewhere"}
    async with fleet.agent() as holder, FakeAgent(fleet.url, report("n2", 1, []), TOKEN) as agent:
        await eventually(lambda: None not in (holder.welcome, agent.welcome))
        for lie in ({}, {"eos_token_ids": (9,)}):
            agent.received.clear()
            copied = asyncio.ensure_future(anext(fleet.runtime.copy_checkpoint(known, NodeId("n2"))))
            await eventually(lambda: any(isinstance(f, ImportCheckpoint) for f in agent.received))
            task_id = next(f.task_id for f in agent.received if isinstance(f, ImportCheckpoint))
            await agent.send(ImportFinished(task_id, replace(known, **settings | lie)))
            if not lie:
                await copied
                continue
            with pytest.raises(CheckpointCorrupt, match="n2 got checkpoint"):
                await copied
            await eventually(lambda: DeleteCheckpoint(known.digest) in agent.received)


async def test_an_import_whose_caller_leaves_is_cancelled_and_one_whose_node_leaves_fails(fleet: Fleet) -> None:
    with pytest.raises(NodeLost):
        await anext(fleet.runtime.import_checkpoint(CheckpointKind.MODEL, "/models/x"))
    async with fleet.agent() as agent:
        await eventually(lambda: agent.welcome is not None)
        waiting = asyncio.ensure_future(anext(fleet.runtime.import_checkpoint(CheckpointKind.MODEL, "/models/x")))
        await eventually(lambda: any(isinstance(f, ImportCheckpoint) for f in agent.received))
        waiting.cancel()
        await eventually(lambda: any(isinstance(f, CancelTask) for f in agent.received))
        abandoned = asyncio.ensure_future(anext(fleet.runtime.import_checkpoint(CheckpointKind.MODEL, "/models/x")))
        await asyncio.sleep(0.02)
        await agent.hang_up()
        with pytest.raises(NodeLost):
            await abandoned


async def test_a_link_replaced_by_a_newer_one_fails_its_errands_and_is_heard_no_more(fleet: Fleet) -> None:
    async with fleet.agent() as older:
        await eventually(lambda: older.welcome is not None)
        asked = fleet.runtime.import_checkpoint(CheckpointKind.MODEL, "/models/x")
        waiting = asyncio.ensure_future(anext(asked))
        evicting = asyncio.ensure_future(fleet.runtime.evict_checkpoint(model("a").checkpoint.digest))
        await eventually(lambda: sum(isinstance(f, (ImportCheckpoint, EvictCheckpoint)) for f in older.received) == 2)
        async with fleet.agent() as newer:
            await eventually(lambda: newer.welcome is not None)
            for task in (waiting, evicting):
                with pytest.raises(NodeLost):
                    await asyncio.wait_for(task, 60.0)
            again = asyncio.ensure_future(anext(fleet.runtime.import_checkpoint(CheckpointKind.MODEL, "/models/x")))
            await eventually(lambda: any(isinstance(f, ImportCheckpoint) for f in newer.received))
            task_id = next(f.task_id for f in newer.received if isinstance(f, ImportCheckpoint))
            await newer.send(ImportFinished(task_id, checkpoint("new")))
            assert isinstance(await again, ImportFinished)


async def test_a_start_is_measured_to_its_last_byte(fleet: Fleet) -> None:
    async with fleet.agent() as agent:
        agent.fill_s = 2.0
        await collect(fleet.runtime.open(request()))
        assert fleet.started == []
        assert fleet.runtime.counters.start_error_s == 0.0
        assert fleet.runtime.snapshot()["instances"][0]["start_s"] is None
        await eventually(lambda: fleet.started == [("a", TIMINGS)])
        (row,) = fleet.runtime.snapshot()["instances"]
        assert row["start_s"] >= 2.0
        assert abs(row["start_s"] - row["estimate_s"]) == pytest.approx(fleet.runtime.counters.start_error_s, abs=0.05)


async def test_checks_go_on_after_one_that_breaks(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fleet.runtime.core, "check", lambda: {}["no such model"])
        await eventually(lambda: fleet.runtime.counters.num_check_failures >= 2)
    fleet.runtime.counters.num_check_failures = 0


async def test_orphans_are_deleted_where_they_lie_and_nothing_is_while_a_name_is_being_made(fleet: Fleet) -> None:
    runtime = fleet.runtime
    runtime._janitor._grace_s = 0.1
    runtime.registry_loaded({Digest("orphan"), Digest("digest-of-a")})
    async with fleet.agent("n1") as clean, fleet.agent("n2", residency=(resident("orphan"),)) as littered:
        with runtime.registering():
            await asyncio.sleep(0.3)
            runtime.remove_model(ModelId("a"))
            await asyncio.sleep(0.1)
            assert not [f for f in [*clean.received, *littered.received] if isinstance(f, DeleteCheckpoint)]
        await eventually(lambda: DeleteCheckpoint(Digest("orphan")) in littered.received)
        await eventually(lambda: DeleteCheckpoint(Digest("digest-of-a")) in clean.received)
        assert DeleteCheckpoint(Digest("orphan")) not in clean.received


async def test_files_come_from_a_node_that_holds_them(fleet: Fleet) -> None:
    async def serve(request: web.Request) -> web.Response:
        if request.match_info["name"] != "tokenizer.json" or request.headers["Authorization"] != f"Bearer {TOKEN}":
            raise web.HTTPNotFound
        return web.Response(body=b"x" * 3_000_000)

    app = web.Application()
    app.router.add_get("/checkpoints/{digest}/files/{name}", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    digest_a = model("a").checkpoint.digest
    with pytest.raises(NodeLost):
        await fleet.runtime.fetch_file(digest_a, "tokenizer.json")
    async with fleet.agent("n1", http_url="http://127.0.0.1:1"), fleet.agent("n2", http_url=url):
        await eventually(lambda: len(fleet.runtime.core.fleet.nodes) == 2)
        assert len(await fleet.runtime.fetch_file(digest_a, "tokenizer.json")) == 3_000_000
        with pytest.raises(NotFound):
            await fleet.runtime.fetch_file(digest_a, "absent.json")
    await runner.cleanup()


async def test_a_live_journal_replays_to_what_the_live_core_did(fleet: Fleet) -> None:
    async with fleet.agent() as agent:
        for n in range(20):
            handle = fleet.runtime.open(request(f"r{n}", 3))
            if n % 5 == 0:
                handle.cancel()
            elif n % 7 == 0:
                await agent.hang_up()
                await agent.dial()
            else:
                await collect(handle)
    steps = list(replay(fleet.journal))
    assert len(steps) == fleet.runtime.counters.num_events
    assert digest(steps) == digest(replay(fleet.journal))
    dispatched = [a for _, _, actions in steps for a in actions if type(a).__name__ == "Dispatch"]
    assert len(dispatched) == fleet.runtime.counters.num_dispatches
    assert b"1001" not in fleet.journal.read_bytes(), "no tokens"


async def test_the_snapshot_is_plain_and_names_what_is_there(fleet: Fleet) -> None:
    async with fleet.agent():
        await collect(fleet.runtime.open(request()))
        seen = fleet.runtime.snapshot()
        assert [(node["id"], node["num_instances"], node["num_slots"]) for node in seen["nodes"]] == [("n1", 1, 1)]
        row = seen["instances"][0]
        assert (row["id"], row["model"], row["node"], row["state"]) == ("a.t1.1", "a", "n1", "ready")
        assert row["timings"]["tier"] == "ssd"
        assert 240 < row["expires_in_s"] <= 300
        assert seen["models"][0]["num_replicas"] == 1
        fleet.runtime.open(request("r2", model_id="b"))
        (queue,) = fleet.runtime.snapshot()["queues"]
        assert (queue["model"], queue["num_waiting"]) == ("b", 1)
        assert "holds checkpoint digest-of-b" in queue["reason"]
        assert fleet.runtime.counters.num_dispatches == 1
        assert json.loads(json.dumps(seen)) == seen
    assert fleet.started == [("a", TIMINGS)]

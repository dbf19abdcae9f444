"""Two agents: what one has the other copies from it, chunk by chunk, and serves."""

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from nearline.protocol import CheckpointInfo, CheckpointKind, InstanceId, InstanceSpec, ModelId, TaskId, peer_source
from nearline.protocol.frames import DeleteCheckpoint, EnsureInstance, ImportCheckpoint, ImportFinished, TaskFailed
from tests.checkpoint_store.web import web
from tests.node_agent.conftest import Agent, FakeController, running_agent


@pytest.fixture
async def peer_controller() -> AsyncIterator[FakeController]:
    """The controller's end of the other agent's link."""
    fake = FakeController()
    await fake.start()
    yield fake
    await fake.stop()


async def outcome(controller: FakeController, task_id: str, source: str) -> Any:
    await controller.send(ImportCheckpoint(TaskId(task_id), CheckpointKind.MODEL, source))
    return await controller.hear(
        lambda f: f if isinstance(f, (ImportFinished, TaskFailed)) and f.task_id == task_id else None
    )


async def test_a_checkpoint_is_copied_from_the_node_that_has_it_and_served(
    controller: FakeController,
    peer_controller: FakeController,
    agent: Agent,
    tmp_path: Path,
    stored_checkpoint: tuple[CheckpointInfo, Path],
) -> None:
    info, root = stored_checkpoint
    url = (await controller.report()).http_url
    async with running_agent(peer_controller, tmp_path / "other", "--prewarm", "1"):
        await peer_controller.report()
        source = peer_source(info.digest, ["http://127.0.0.1:9", url])
        finished = await outcome(peer_controller, "copy", source)
        assert isinstance(finished, ImportFinished), finished
        assert finished.checkpoint == info
        copied = tmp_path / "other" / "store" / "checkpoints" / info.digest
        for name in ("model.safetensors", *info.files):
            assert (copied / name).read_bytes() == (root / "checkpoints" / info.digest / name).read_bytes()
        await peer_controller.ensure("i1", info.digest)
        await peer_controller.state("i1", "ready")
        refused = await outcome(peer_controller, "other", peer_source(info.digest[::-1], [url]))  # type: ignore[arg-type]
        assert refused.error.code == "not_found"


async def test_a_node_of_the_controllers_machine_is_found_from_another_where_the_controller_is(
    controller: FakeController, tmp_path: Path, data_dir: Path, stored_checkpoint: tuple[CheckpointInfo, Path]
) -> None:
    """Two machines on one: 127.0.0.2 is the controller's, whose own node told it that it listens on 127.0.0.1."""
    first = FakeController("127.0.0.2")
    await first.start()
    try:
        async with running_agent(controller, data_dir, "--host", "127.0.0.2", "--prewarm", "0"):
            url = (await controller.report()).http_url
            assert url.startswith("http://127.0.0.2:")
            told = url.replace("127.0.0.2", "127.0.0.1")
            (tmp_path / "b").mkdir()
            async with running_agent(first, tmp_path / "b" / "node", "--host", "127.0.0.3", "--prewarm", "0"):
                await first.report()
                info = stored_checkpoint[0]
                finished = await outcome(first, "copy", peer_source(info.digest, [told]))
                assert isinstance(finished, ImportFinished), finished
                await first.send(DeleteCheckpoint(info.digest))
                await first.report(lambda report: not report.residency)
                refused = await outcome(first, "named", f"http://127.0.0.1:{url.rpartition(':')[2]}/model")
                assert isinstance(refused, TaskFailed)
                assert "127.0.0.1" in refused.error.message, "what a person names is taken as it is"
    finally:
        await first.stop()


async def test_what_was_evicted_comes_back_from_a_peer_before_its_source_is_asked(
    controller: FakeController,
    peer_controller: FakeController,
    tmp_path: Path,
    tiny_llama_dir: Callable[..., Path],
) -> None:
    for seed in (1, 2):
        shutil.copytree(tiny_llama_dir(seed=seed), tmp_path / "web" / f"m{seed}")
    budget = (tmp_path / "web" / "m1" / "model.safetensors").stat().st_size + 1024 * 1024 + 200_000
    flags = ("--ssd-budget", str(budget), "--prewarm", "1", "--slots", "1")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with web(tmp_path / "web") as server:
        async with (
            running_agent(controller, tmp_path / "a" / "node", *flags),
            running_agent(peer_controller, tmp_path / "b" / "node", "--prewarm", "0"),
        ):
            await controller.report()
            url = (await peer_controller.report()).http_url
            digest = (await outcome(controller, "t1", f"{server.url}/m1")).checkpoint.digest
            await outcome(controller, "t2", f"{server.url}/m2")
            await outcome(peer_controller, "t3", f"{server.url}/m1")
            rows = {row.digest: row for row in (await controller.report()).residency}
            assert rows[digest].is_fetchable
            num_asked = len(server.requests)
            spec = InstanceSpec(InstanceId("i1"), ModelId("m"), digest)
            await controller.send(EnsureInstance(spec, peers=(url,)))
            await controller.state("i1", "ready")
            assert len(server.requests) == num_asked, "the source was not needed"
            rows = {row.digest: row for row in (await controller.report()).residency}
            assert rows[digest].ssd_bytes == rows[digest].num_bytes

"""Imports through a real agent and the real importer."""

import asyncio
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nearline.checkpoint_store import CHUNK_BYTES, CheckpointStore, StoreConfig
from nearline.node_agent.import_process import ImportProcess
from nearline.node_agent.imports import Imports
from nearline.protocol import TOKEN_VARIABLE, CheckpointInfo, CheckpointKind, TaskId
from nearline.protocol.errors import Fault
from nearline.protocol.frames import CancelTask, ImportCheckpoint, ImportFinished, TaskFailed, TaskProgress
from tests.node_agent.conftest import FakeController, running_agent


def outcome(task_id: str) -> Callable[[Any], Any]:
    return lambda f: f if isinstance(f, (ImportFinished, TaskFailed)) and f.task_id == task_id else None


@pytest.fixture
def empty_dir(tmp_path: Path) -> Path:
    return tmp_path / "empty"


async def test_imports_report_progress_end_once_and_can_be_cancelled(
    controller: FakeController,
    empty_dir: Path,
    tiny_llama_dir: Callable[..., Path],
    stored_checkpoint: tuple[CheckpointInfo, Path],
) -> None:
    source = str(tiny_llama_dir())
    async with running_agent(controller, empty_dir, "--prewarm", "0") as agent:
        await controller.report()
        for task_id in ("t1", "t2"):
            await controller.send(ImportCheckpoint(TaskId(task_id), CheckpointKind.MODEL, source))
        for number in range(3):
            other = shutil.copytree(source, empty_dir.parent / f"copy-{number}")
            await controller.send(ImportCheckpoint(TaskId(f"c{number}"), CheckpointKind.MODEL, str(other)))
        await controller.send(CancelTask(TaskId("c2")))
        await controller.send(ImportCheckpoint(TaskId("bad"), CheckpointKind.MODEL, str(empty_dir / "nothing")))
        for task_id in ("t1", "t2", "c0", "c1"):
            finished = await controller.hear(outcome(task_id))
            assert finished.checkpoint.digest == stored_checkpoint[0].digest
        assert (await controller.hear(outcome("c2"))).error.code == "cancelled"
        failed = await controller.hear(outcome("bad"))
        assert "nothing" in failed.error.message
        report = await controller.report(lambda r: bool(r.residency))
        assert [r.digest for r in report.residency] == [stored_checkpoint[0].digest]
        ended = [f.task_id for f in controller.heard if isinstance(f, (ImportFinished, TaskFailed))]
        assert sorted(ended) == ["bad", "c0", "c1", "c2", "t1", "t2"]
        phases = [f.phase for f in controller.heard if isinstance(f, TaskProgress) and f.task_id == "t2"]
        assert len(set(phases)) >= 2
        assert await agent.terminate() == 0


async def test_only_a_copy_from_peers_is_told_the_clusters_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str | None] = []

    async def start(_: Path, environment: Mapping[str, str]) -> ImportProcess:
        told.append(environment.get(TOKEN_VARIABLE))
        raise Fault("not started")

    monkeypatch.setattr(ImportProcess, "start", start)
    monkeypatch.setenv(TOKEN_VARIABLE, "inherited")
    said: asyncio.Queue[object] = asyncio.Queue()
    store = CheckpointStore(StoreConfig(root=tmp_path, dram_pool_bytes=CHUNK_BYTES))
    imports = Imports(tmp_path, said.put_nowait, store, "secret")
    for source in ("hub:org/name", "https://there/m", "/a/directory", f"peer:{'0' * 32}@http://n"):
        imports.start(ImportCheckpoint(TaskId(source), CheckpointKind.MODEL, source))
        while not isinstance(await said.get(), TaskFailed):
            pass
    assert told == [None, None, None, "secret"]
    await imports.close()
    store.close()

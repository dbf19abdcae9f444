"""A model whose bytes left SSD comes back from its source when an instance needs it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nearline.protocol import CheckpointInfo, CheckpointKind, TaskId
from nearline.protocol.frames import ImportCheckpoint, ImportFinished, TaskFailed
from tests.checkpoint_store.web import web
from tests.node_agent.conftest import FakeController, running_agent

SPARE = 1024 * 1024
"""An import asks for so much more than its tensors."""


async def add(controller: FakeController, task_id: str, source: str) -> Any:
    def outcome(frame: Any) -> Any:
        return frame if isinstance(frame, (ImportFinished, TaskFailed)) and frame.task_id == task_id else None

    await controller.send(ImportCheckpoint(TaskId(task_id), CheckpointKind.MODEL, source))
    return await controller.hear(outcome)


async def test_imports_and_instances_make_room_of_what_can_be_fetched_again(
    controller: FakeController,
    tmp_path: Path,
    tiny_llama_dir: Callable[..., Path],
    stored_checkpoint: tuple[CheckpointInfo, Path],
) -> None:
    for seed in (1, 2):
        shutil.copytree(tiny_llama_dir(seed=seed), tmp_path / "web" / f"m{seed}")
    budget = stored_checkpoint[0].num_bytes + SPARE + 200_000
    flags = ("--ssd-budget", str(budget), "--prewarm", "1", "--slots", "1")
    with web(tmp_path / "web") as server:
        async with running_agent(controller, tmp_path / "node", *flags):
            await controller.report()
            first, second = [await add(controller, f"t{seed}", f"{server.url}/m{seed}") for seed in (1, 2)]
            digest = first.checkpoint.digest
            report = await controller.report(lambda r: len(r.residency) == 2)
            rows = {row.digest: row for row in report.residency}
            assert (rows[digest].ssd_bytes, rows[digest].is_fetchable) == (0, True)
            assert rows[second.checkpoint.digest].ssd_bytes == second.checkpoint.num_bytes
            assert 0 <= report.ssd_free_bytes <= SPARE + 200_000

            await controller.ensure("i1", digest)
            await controller.state("i1", "ready")
            report = await controller.report(lambda r: {row.digest: row for row in r.residency}[digest].ssd_bytes > 0)
            rows = {row.digest: row for row in report.residency}
            assert rows[second.checkpoint.digest].is_fetchable, "it made room for the one that is needed"

            refused = await add(controller, "t3", str(tiny_llama_dir(seed=3)))
            assert refused.error.code == "storage_full"
            assert "would have to go: remove one of" in refused.error.message
            assert f"{server.url}/m1" in refused.error.message
            assert "in use" in refused.error.message


async def test_a_source_that_changed_is_said_and_what_it_holds_now_is_not_kept(
    controller: FakeController, tmp_path: Path, tiny_llama_dir: Callable[..., Path]
) -> None:
    shutil.copytree(tiny_llama_dir(seed=1), tmp_path / "web" / "m1")
    shutil.copytree(tiny_llama_dir(seed=2), tmp_path / "web" / "m2")
    budget = (tmp_path / "web" / "m1" / "model.safetensors").stat().st_size + SPARE + 200_000
    flags = ("--ssd-budget", str(budget), "--prewarm", "1", "--slots", "1")
    with web(tmp_path / "web") as server:
        async with running_agent(controller, tmp_path / "node", *flags):
            await controller.report()
            digest = (await add(controller, "t1", f"{server.url}/m1")).checkpoint.digest
            other = (await add(controller, "t2", f"{server.url}/m2")).checkpoint.digest
            for number, seed in enumerate((3, 2)):
                shutil.rmtree(tmp_path / "web" / "m1")
                shutil.copytree(tiny_llama_dir(seed=seed), tmp_path / "web" / "m1")
                await controller.ensure(f"i{number}", digest)
                failed = await controller.state(f"i{number}", "failed")
                assert failed.error is not None
                assert failed.error.code == "checkpoint_unreadable"
                assert f"{server.url}/m1 is not what it was" in failed.error.message
                report = await controller.report(lambda r: len(r.residency) == 2)
                assert {row.digest for row in report.residency} == {digest, other}

"""Errands through a real agent: verification with progress, eviction with the bytes it freed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nearline.protocol import CheckpointInfo, Digest, TaskId
from nearline.protocol.frames import (
    CancelTask,
    EvictCheckpoint,
    Preload,
    TaskFailed,
    TaskFinished,
    TaskProgress,
    VerifyCheckpoint,
)
from tests.node_agent.conftest import Agent, FakeController


def outcome(task_id: str) -> Callable[[Any], Any]:
    return lambda f: f if isinstance(f, (TaskFinished, TaskFailed)) and f.task_id == task_id else None


async def test_a_checkpoint_is_verified_with_progress_and_a_flipped_bit_is_named(
    controller: FakeController, agent: Agent, stored_checkpoint: tuple[CheckpointInfo, Path], data_dir: Path
) -> None:
    info = stored_checkpoint[0]
    await controller.send(VerifyCheckpoint(TaskId("v1"), info.digest))
    finished = await controller.hear(outcome("v1"))
    assert isinstance(finished, TaskFinished), finished
    assert finished.num_bytes == info.num_bytes
    assert finished.seconds > 0
    progress = [f for f in controller.heard if isinstance(f, TaskProgress) and f.task_id == "v1"]
    assert progress[0].phase == "queued"
    assert (progress[-1].phase, progress[-1].done_bytes) == ("verifying", info.num_bytes)

    weights = data_dir / "store" / "checkpoints" / info.digest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    await controller.send(VerifyCheckpoint(TaskId("v2"), info.digest))
    failed = await controller.hear(outcome("v2"))
    assert failed.error.code == "checkpoint_corrupt"
    assert "model.safetensors: 1 of 1 chunks are wrong: chunk 0" in failed.error.message
    await controller.ensure("i1", info.digest)
    status = await controller.state("i1", "failed")
    assert status.error is not None
    assert status.error.code == "checkpoint_unreadable"
    assert "import it again" in status.error.message


async def test_eviction_says_what_it_freed_and_the_report_follows(
    controller: FakeController, agent: Agent, stored_checkpoint: tuple[CheckpointInfo, Path]
) -> None:
    digest = stored_checkpoint[0].digest
    await controller.send(Preload(digest))
    await controller.report(lambda r: r.residency[0].dram_bytes > 0)
    await controller.send(EvictCheckpoint(digest, TaskId("e1")))
    freed = await controller.hear(outcome("e1"))
    assert freed.num_bytes > 0
    await controller.report(lambda r: r.residency[0].dram_bytes == 0)
    await controller.send(EvictCheckpoint(digest, TaskId("e2")))
    assert (await controller.hear(outcome("e2"))).num_bytes == 0


async def test_what_cannot_be_done_is_answered_and_a_cancelled_task_that_is_over_is_no_news(
    controller: FakeController, agent: Agent
) -> None:
    await controller.send(CancelTask(TaskId("long-gone")))
    await controller.send(EvictCheckpoint(Digest("0" * 32)))
    for task_id, wish in (("v", VerifyCheckpoint), ("e", lambda t, d: EvictCheckpoint(d, t))):
        await controller.send(wish(TaskId(task_id), Digest("0" * 32)))
        failed = await controller.hear(outcome(task_id))
        assert failed.error.code == "model_not_found"

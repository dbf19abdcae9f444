"""Profiles on disk, and one taken through a real agent of a real engine."""

import asyncio
import errno
import resource
from pathlib import Path

import pytest

from nearline.node_agent.profiles import Profiles
from nearline.protocol import CheckpointInfo, Digest, InstanceId, StepProfile, StepTimeModel, TaskId
from nearline.protocol.frames import ProfileFinished, ProfileInstance, ProfileProgress, TaskFailed
from tests.node_agent.conftest import FakeController, running_agent

PROFILE = StepProfile(Digest("d"), "cpu", 2, StepTimeModel.guess(10**9), 0.04, 0.02, 30, 1e9, 1.75e9)


def test_a_profile_is_there_after_a_restart_until_its_checkpoint_goes(tmp_path: Path) -> None:
    Profiles(tmp_path).keep(PROFILE)
    again = Profiles(tmp_path)
    assert (again.of(Digest("d")), again.all()) == (PROFILE, (PROFILE,))
    again.forget(Digest("d"))
    again.forget(Digest("never known"))
    assert Profiles(tmp_path).all() == ()


def test_a_torn_profile_is_as_if_it_had_never_been_measured(tmp_path: Path) -> None:
    Profiles(tmp_path).keep(PROFILE)
    (tmp_path / "torn.json").write_text('{"digest": "x", "dev')
    (tmp_path / "other.json").write_text('{"digest": "x"}')
    assert Profiles(tmp_path).all() == (PROFILE,)


def test_a_profile_that_a_full_disk_does_not_take_is_known_until_the_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_in_part(path: Path, text: str) -> int:
        path.write_bytes(text.encode()[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_in_part)
    profiles = Profiles(tmp_path)
    profiles.keep(PROFILE)
    assert profiles.of(Digest("d")) == PROFILE
    assert list(tmp_path.iterdir()) == []


async def test_a_profile_is_measured_reported_and_kept(
    controller: FakeController, data_dir: Path, stored_checkpoint: tuple[CheckpointInfo, Path]
) -> None:
    digest = stored_checkpoint[0].digest
    async with running_agent(controller, data_dir, "--slots", "1", "--prewarm", "1", engine=None) as agent:
        await controller.report(lambda r: r.num_prewarmed == 1)
        await controller.send(ProfileInstance(TaskId("p1"), InstanceId("i1")))
        refused = await controller.hear(lambda f: isinstance(f, TaskFailed) and f)
        assert refused.error.code == "instance_failed", "nothing runs yet"
        await controller.ensure("i1", digest)
        await controller.state("i1", "ready")
        await controller.send(ProfileInstance(TaskId("p2"), InstanceId("i1")))
        await controller.hear(lambda f: isinstance(f, ProfileProgress) and f.done_steps)
        finished = await controller.hear(lambda f: isinstance(f, ProfileFinished) and f)
        assert finished.task_id == "p2"
        report = await controller.report(lambda r: bool(r.profiles))
        assert report.profiles == (finished.profile,)
        assert report.profiles[0].digest == digest
        pid, no_limit = agent.process.pid, resource.RLIM_INFINITY
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, no_limit))  # a full disk looks like that
        await controller.send(ProfileInstance(TaskId("p3"), InstanceId("i1")))
        unkept = await controller.hear(lambda f: isinstance(f, ProfileFinished) and f.task_id == "p3" and f)
        await controller.submit("i1", "r1", max_tokens=2)
        assert (await controller.finished("r1"))[-1].error is None, "neither the profile nor the log stops its engine"
        assert (await controller.report()).profiles == (unkept.profile,)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (no_limit, no_limit))
        assert await agent.terminate() == 0
    controller.heard.clear()
    async with running_agent(controller, data_dir, "--slots", "1", "--prewarm", "0"):
        report = await controller.report(lambda r: bool(r.profiles))
        assert report.profiles == (finished.profile,)


async def test_a_profile_is_refused_while_requests_run_on_the_node(
    controller: FakeController, data_dir: Path, stored_checkpoint: tuple[CheckpointInfo, Path]
) -> None:
    async with running_agent(controller, data_dir, "--slots", "2", "--prewarm", "1"):
        await controller.report(lambda r: r.num_prewarmed == 1)
        await controller.ensure("i1", stored_checkpoint[0].digest)
        await controller.state("i1", "ready")
        await controller.submit("i1", "r1", max_tokens=10**6)
        await asyncio.sleep(0.1)
        await controller.send(ProfileInstance(TaskId("p"), InstanceId("i1")))
        refused = await controller.hear(lambda f: isinstance(f, TaskFailed) and f)
        assert (refused.task_id, refused.error.code) == ("p", "overloaded")

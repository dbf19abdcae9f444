"""A disk without room: nothing is acknowledged that would be lost, what is there can be read, all goes on by itself.

A limit on the size of files stands for the full disk: the server's appends fail with the same consequence.
"""

import asyncio
import errno
import resource
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nearline.client.valkey import valkey_command
from nearline.controller import events as happened
from nearline.controller.config import CoreConfig, RuntimeConfig
from nearline.controller.durable.jobs import JobRequest, JobStore
from nearline.controller.durable.lease import LeaderLease
from nearline.controller.durable.redis_state import State
from nearline.controller.durable.registry import Registry
from nearline.controller.journal import JournalWriter, read, replay
from nearline.controller.journal_keeper import RESUME_AFTER_S, JournalKeeper
from nearline.controller.service import _check_data_dir
from nearline.protocol import ModelId, ModelSpec, TenantId
from nearline.protocol.errors import InvalidRequest, StateUnavailable
from tests.controller.fleets import checkpoint

ANN = TenantId("ann")
FULL = "full or broken"


class Server:
    """The platform's own Valkey, on a disk whose room is ours to give."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "v.sock"
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> State:
        self._spawn()
        state = State(f"unix://{self.socket}", "f:")
        for _ in range(1200):
            try:
                await state.ping()
                return state
            except StateUnavailable:
                await asyncio.sleep(0.05)
        raise TimeoutError("Valkey does not start")

    def _spawn(self) -> None:
        """Python ignores SIGXFSZ; handed on, a write beyond the limit fails instead of killing the server."""
        command = valkey_command(self.directory / "data", self.socket)
        self.process = subprocess.Popen(command, restore_signals=False)

    def fill(self) -> None:
        sizes = [path.stat().st_size for path in self.directory.rglob("*.aof")]
        self._limit(max(sizes))

    def free(self) -> None:
        self._limit(resource.RLIM_INFINITY)

    def _limit(self, num_bytes: int) -> None:
        assert self.process is not None
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    with tempfile.TemporaryDirectory(prefix="nlv") as directory:
        made = Server(Path(directory))
        yield made
        made.kill()


def job(number: int) -> JobRequest:
    return JobRequest(ANN, "function", "m", {"prompt": str(number)}, 60.0)


async def test_a_job_is_accepted_only_if_it_will_survive(server: Server) -> None:
    state = await server.start()
    accepted = [await JobStore(state).submit(job(0))]
    server.fill()
    for number in range(1, 6):
        with pytest.raises(StateUnavailable, match=FULL):
            accepted.append(await JobStore(state).submit(job(number)))
    assert (await JobStore(state).get(accepted[0], ANN)).body == {"prompt": "0"}
    server.free()
    async with asyncio.timeout(60):
        while len(accepted) < 3:
            try:
                accepted.append(await JobStore(state).submit(job(9)))
            except StateUnavailable:
                await asyncio.sleep(0.1)
    await state.close()
    server.kill()
    again = await server.start()
    for job_id in accepted:
        assert (await JobStore(again).get(job_id, ANN)).model == "m"
    await again.close()


async def test_a_model_is_registered_only_if_its_name_will_survive(server: Server) -> None:
    state = await server.start()
    registry = Registry(state, await LeaderLease(state).acquire())
    spec = ModelSpec(ModelId("m"), checkpoint("d"), 1.0)
    await registry.put_model(spec)
    server.fill()
    with pytest.raises(StateUnavailable, match=FULL):
        await registry.put_model(ModelSpec(ModelId("n"), checkpoint("d"), 1.0))
    assert list(registry.models) == ["m"]
    await state.close()


async def test_a_starting_controller_waits_out_a_full_disk(server: Server) -> None:
    state = await server.start()
    await state.redis.set("x", "y")
    server.fill()
    with pytest.raises(StateUnavailable, match=FULL):
        await JobStore(state).submit(job(0))
    starting = asyncio.create_task(LeaderLease(state, ttl_s=1.0).acquire())
    await asyncio.sleep(0.5)
    assert not starting.done()
    assert await state.redis.get("x") == "y"
    server.free()
    assert await asyncio.wait_for(starting, 60.0) == 1
    await state.close()


class SmallDisk:
    """Refuses what goes beyond `room` bytes, part by part as a file system does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 0
        original = Path.open
        disk = self

        class File:
            def __init__(self, inner: Any) -> None:
                self.inner = inner

            def write(self, data: bytes) -> int:
                taken = min(len(data), disk.room)
                if not taken:
                    raise OSError(errno.ENOSPC, "No space left on device")
                disk.room -= taken
                written: int = self.inner.write(data[:taken])
                return written

            def close(self) -> None:
                self.inner.close()

        def opened(path: Path, mode: str = "r", **settings: Any) -> Any:
            made = original(path, mode, **settings)
            return File(made) if mode == "wb" and path.suffix == ".journal" else made

        monkeypatch.setattr(Path, "open", opened)


def test_a_journal_goes_on_when_there_is_room_again_and_owns_up_to_the_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(monkeypatch)
    config = RuntimeConfig(core=CoreConfig(epoch="e"), journal_directory=str(tmp_path))
    keeper = JournalKeeper(config)
    disk.room = 2000
    now = 0.0
    while not keeper.num_errors:
        now += 0.1
        keeper.record(happened.Woke(), now)
    assert len(list(replay(tmp_path / "e.000.journal"))) == round(now * 10) - 1
    keeper.record(happened.Woke(), now + 1.0)
    disk.room = 10_000
    keeper.record(happened.Woke(), now + RESUME_AFTER_S)
    keeper.record(happened.Woke(), now + RESUME_AFTER_S + 1.0)
    assert keeper.num_errors == 1
    assert len(list(replay(tmp_path / "e.000.journal"))) == round(now * 10) - 1, "the gap ends the replay"
    header, events = read(tmp_path / "e.002.journal")
    assert (header.part, len(list(events))) == (2, 2)
    keeper.close()


def test_a_journal_that_cannot_begin_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(monkeypatch)
    keeper = JournalKeeper(RuntimeConfig(core=CoreConfig(epoch="e"), journal_directory=str(tmp_path)))
    keeper.record(happened.Woke(), 1.0)
    disk.room = 10_000
    keeper.record(happened.Woke(), 1.0 + RESUME_AFTER_S)
    assert keeper.num_errors == 1
    header, events = read(tmp_path / "e.001.journal")
    assert (header.part, len(list(events))) == (1, 1)
    keeper.close()


def test_a_record_that_was_written_in_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(monkeypatch)
    disk.room = 10
    with pytest.raises(OSError, match="10 of"):
        JournalWriter(tmp_path, CoreConfig(epoch="e"), 1 << 20, 10)


@pytest.mark.parametrize(("number", "is_fatal"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EROFS, True)])
def test_a_full_data_directory_stops_no_start_and_one_that_is_not_ours_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_fatal: bool
) -> None:
    def refuse(self: Path, data: bytes) -> int:
        raise OSError(number, "refused")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    if is_fatal:
        with pytest.raises(InvalidRequest, match="choose another --data-dir"):
            _check_data_dir(tmp_path)
    else:
        _check_data_dir(tmp_path)

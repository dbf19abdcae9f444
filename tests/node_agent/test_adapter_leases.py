"""What is lent to engines: at once or when it is there; pinned until it is given back or its process ends."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nearline.checkpoint_store import CheckpointStore, Manifest, StoreConfig
from nearline.checkpoint_store.weights_file import WeightsFile
from nearline.node_agent.adapter_leases import AdapterLeases
from nearline.node_agent.types import EngineId
from nearline.protocol import CheckpointKind, Digest
from nearline.protocol.frames import AdapterBytes
from tests.checkpoint_store.checkpoints import TINY_CHUNK, commit, random_bytes

ONE, TWO = EngineId(1), EngineId(2)
WAIT_S = 60


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    (tmp_path / "checkpoints").mkdir()
    for seed in range(2):
        commit(tmp_path / "checkpoints", {"w": ("U8", (9000,), random_bytes(9000, seed))}, kind=CheckpointKind.ADAPTER)
    store = CheckpointStore(
        StoreConfig(root=tmp_path, dram_pool_bytes=2 * TINY_CHUNK, frame_bytes=TINY_CHUNK, touch_ahead_bytes=0)
    )
    yield store
    store.check()
    store.close()


class Lending:
    """The leases of a store, and what engines were sent."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self.sent: asyncio.Queue[tuple[EngineId, Any]] = asyncio.Queue()
        self.leases = AdapterLeases(store, lambda *message: self.sent.put_nowait(message))

    async def answer(self) -> tuple[EngineId, AdapterBytes]:
        return await asyncio.wait_for(self.sent.get(), WAIT_S)

    def read(self, lent: AdapterBytes) -> bytes:
        return b"".join(os.pread(self.store.pool.fd, e.num_bytes, e.offset) for e in lent.extents)

    def is_pinned(self, digest: Digest) -> bool:
        return next(r.is_pinned for r in self.store.residency() if r.digest == digest)


def first(store: CheckpointStore) -> Manifest:
    return store.checkpoints()[0]


def weights(store: CheckpointStore, manifest: Manifest) -> bytes:
    return (store.directory(manifest.digest) / "model.safetensors").read_bytes()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - nothing tells of it; the timeout ends the wait
            await asyncio.sleep(0.005)


async def test_what_is_on_disk_is_sent_when_it_is_there_and_lent_at_once_from_then_on(store: CheckpointStore) -> None:
    lending, manifest = Lending(store), first(store)
    assert lending.leases.lend(ONE, manifest.digest) is None
    lending.leases.wanted(ONE, manifest.digest)  # it is on its way: not answered twice
    engine_id, sent = await lending.answer()
    assert (engine_id, sent.digest) == (ONE, manifest.digest)
    assert lending.read(sent) == weights(store, manifest)
    again = lending.leases.lend(TWO, manifest.digest)
    assert again is not None
    assert again.extents == sent.extents
    assert again.lease_id != sent.lease_id
    assert lending.sent.empty()
    lending.leases.close()


async def test_a_pin_ends_when_the_last_reader_gives_it_back_or_is_gone(store: CheckpointStore) -> None:
    lending, manifest = Lending(store), first(store)
    store.preload(manifest.digest).result(WAIT_S)
    one, two, dying = (lending.leases.lend(engine_id, manifest.digest) for engine_id in (ONE, ONE, TWO))
    assert one
    assert two
    assert dying
    lending.leases.free(ONE, one.lease_id)
    lending.leases.free(TWO, two.lease_id)  # not its own
    lending.leases.free(ONE, one.lease_id)
    lending.leases.gone(TWO)
    assert lending.is_pinned(manifest.digest)
    lending.leases.free(ONE, two.lease_id)
    assert not lending.is_pinned(manifest.digest)
    lending.leases.close()


async def test_a_process_that_ends_while_its_adapter_is_read_leaves_nothing(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before its adapter is pinned, or while it is read: the disk answers only when it is gone."""
    lending, manifest = Lending(store), first(store)
    disk, read_into = threading.Event(), WeightsFile.read_into

    def held(self: WeightsFile, view: memoryview, offset: int) -> None:
        assert disk.wait(WAIT_S)
        read_into(self, view, offset)

    monkeypatch.setattr(WeightsFile, "read_into", held)
    for number in range(20):
        engine_id = EngineId(number)
        disk.clear()
        assert lending.leases.lend(engine_id, manifest.digest) is None
        if number % 2:
            await until(lambda: lending.is_pinned(manifest.digest))
            await asyncio.sleep(0.01)
        lending.leases.gone(engine_id)
        disk.set()
        assert not lending.leases._coming
        await until(lambda: not lending.is_pinned(manifest.digest))
        await until(lambda: store.evict(manifest.digest) >= 0 and store.dram_free_bytes() == store.dram_pool_bytes)
    lending.leases.close()
    assert not lending.is_pinned(manifest.digest)
    assert lending.sent.empty()


async def test_what_cannot_be_had_is_answered_without_extents(store: CheckpointStore) -> None:
    lending, (bad, deleted) = Lending(store), store.checkpoints()
    path = store.directory(bad.digest) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert lending.leases.lend(ONE, bad.digest) is None
    assert await lending.answer() == (ONE, AdapterBytes(bad.digest, (), 0))
    store.delete(deleted.digest)
    lending.leases.wanted(ONE, deleted.digest)
    assert await lending.answer() == (ONE, AdapterBytes(deleted.digest, (), 0))
    assert not lending.is_pinned(bad.digest)
    lending.leases.close()

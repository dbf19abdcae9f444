"""Leases of instances: a checkpoint the pool cannot hold is read by its engine, which alone knows when it has all."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from nearline.checkpoint_store import CheckpointStore, StoreConfig
from nearline.node_agent import events as ev
from nearline.node_agent.leases import Leases
from nearline.protocol import Digest, InstanceId, Tier
from tests.checkpoint_store.checkpoints import TINY_CHUNK, commit_random

ID = InstanceId("i1")
WAIT_S = 60


async def never_fetch(digest: Digest, moved: Callable[[], None]) -> None:
    raise AssertionError(f"{digest} is here")


@pytest.mark.parametrize("may_stream", [True, False])
async def test_a_checkpoint_larger_than_the_pool_is_streamed_where_it_may_be(tmp_path: Path, may_stream: bool) -> None:
    manifest = commit_random(tmp_path / "checkpoints", 9, seed=1)
    config = StoreConfig(root=tmp_path, dram_pool_bytes=4 * TINY_CHUNK, frame_bytes=TINY_CHUNK, touch_ahead_bytes=0)
    store = CheckpointStore(config)
    posted: asyncio.Queue[ev.NodeEvent] = asyncio.Queue()
    leases = Leases(store, posted.put_nowait, never_fetch)
    try:
        leases.acquire(ID, manifest.digest, may_stream)
        answer = await asyncio.wait_for(posted.get(), WAIT_S)
        if not may_stream:
            assert isinstance(answer, ev.LeaseRefused)
            assert "9 chunks" in answer.error.message
            return
        assert answer == ev.LeaseAcquired(ID)
        lease = leases.lease(ID)
        assert lease.frames == ()
        assert posted.empty(), "nobody but the engine knows when it has every byte"
        leases.release_when_read(ID)
        filled = await asyncio.wait_for(posted.get(), WAIT_S)
        assert isinstance(filled, ev.LeaseFilled)
        assert (filled.read_bytes, filled.tier) == (manifest.num_bytes, Tier.SSD)
        store.delete(manifest.digest)
        while lease.directory.exists():  # noqa: ASYNC110 - nothing tells of it; the test's timeout ends the wait
            await asyncio.sleep(0.01)
    finally:
        leases.close()
        store.close()


async def test_a_fetch_tells_its_instance_of_progress_and_is_not_waited_for_once_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(StoreConfig(root=tmp_path, dram_pool_bytes=TINY_CHUNK, frame_bytes=TINY_CHUNK))
    monkeypatch.setattr(store, "is_remote", lambda digest: True)
    posted: asyncio.Queue[ev.NodeEvent] = asyncio.Queue()
    is_over = asyncio.Event()

    async def fetch(digest: Digest, moved: Callable[[], None]) -> None:
        try:
            moved()
            await asyncio.Event().wait()
        finally:
            is_over.set()

    leases = Leases(store, posted.put_nowait, fetch)
    leases.acquire(ID, Digest("d"))
    assert await asyncio.wait_for(posted.get(), WAIT_S) == ev.BytesMoved(ID)
    leases.release(ID)
    await asyncio.wait_for(is_over.wait(), WAIT_S)
    leases.acquire(InstanceId("i2"), Digest("d"))
    leases.release(InstanceId("i2"))
    await asyncio.sleep(0.01)
    assert posted.empty(), "it was given up before it began"
    leases.close()
    store.close()

"""Adapters in packs: leased by extents, read once, checked, shared with models, and never two in one place."""

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from nearline.checkpoint_store import CheckpointStore, Lease, Manifest
from nearline.checkpoint_store.weights_file import WeightsFile
from nearline.protocol import CheckpointKind, Digest, Tier
from nearline.protocol.errors import Cancelled, CheckpointCorrupt, OutOfMemory
from tests.checkpoint_store.checkpoints import acquired_at_once

OpenStore = Callable[..., CheckpointStore]
Add = Callable[..., Manifest]


@pytest.fixture
def add(root: Path, checkpoints: ModuleType) -> Add:
    """Commit an adapter of about so many bytes, or a model."""

    def commit(num_bytes: int, seed: int, kind: CheckpointKind = CheckpointKind.ADAPTER) -> Manifest:
        tensors = {"w": ("U8", (num_bytes,), checkpoints.random_bytes(num_bytes, seed))}
        manifest: Manifest = checkpoints.commit(root / "checkpoints", tensors, kind=kind)
        return manifest

    return commit


def weights(store: CheckpointStore, digest: Digest) -> Path:
    return store.directory(digest) / "model.safetensors"


def content(store: CheckpointStore, lease: Lease) -> bytes:
    """As another process reads it."""
    return b"".join(os.pread(store.pool.fd, extent.num_bytes, extent.offset) for extent in lease.extents)


def test_many_adapters_share_frames_and_each_extent_holds_its_file(open_store: OpenStore, add: Add) -> None:
    manifests = [add(1 + 900 * seed, seed) for seed in range(24)]  # each 4 KiB of header and up to 21 KB
    store = open_store(num_frames=16)
    leases = [store.acquire(manifest.digest) for manifest in manifests]
    for lease in leases:
        stats = lease.done.result(60)
        assert (stats.num_bytes, stats.tier) == (store.manifest(lease.digest).num_bytes, Tier.SSD)
        assert (lease.frames, lease.is_streamed) == ((), False)
    assert [content(store, lease) for lease in leases] == [weights(store, m.digest).read_bytes() for m in manifests]
    assert store.dram_free_bytes() >= 9 * store.pool.layout.frame_bytes
    store.check()


def test_only_what_is_whole_in_dram_is_leased_without_waiting(open_store: OpenStore, add: Add) -> None:
    manifest, other = add(5000, 1), add(5000, 2)
    store = open_store()
    assert store.acquire_resident(manifest.digest) is None
    assert store.acquire_resident(Digest("f" * 32)) is None
    store.preload(manifest.digest).result(60)
    lease = store.acquire_resident(manifest.digest)
    assert lease is not None
    assert lease.done.result(0).tier is Tier.DRAM
    assert content(store, lease) == weights(store, manifest.digest).read_bytes()
    assert store.evict(manifest.digest) == 0
    store.delete(manifest.digest)
    assert store.acquire_resident(manifest.digest) is None, "it is on its way out"
    assert content(store, lease)[-5000:] != bytes(5000)
    lease.release()
    assert not store.acquire_resident(other.digest)
    store.check()


def test_a_preloaded_adapter_is_reported_and_takes_its_size_not_a_frame(open_store: OpenStore, add: Add) -> None:
    manifests = [add(3000, seed) for seed in range(4)]
    store = open_store()
    for manifest in manifests:
        store.preload(manifest.digest).result(60)
    assert {r.digest: r.dram_bytes for r in store.residency()} == {m.digest: m.num_bytes for m in manifests}
    assert store.dram_pool_bytes - store.dram_free_bytes() == store.pool.layout.frame_bytes
    assert store.evict(manifests[0].digest) == manifests[0].num_bytes


def test_an_adapter_of_several_chunks_has_frames_and_extents(open_store: OpenStore, add: Add) -> None:
    manifest = add(150_000, 1)
    store = open_store()
    with store.acquire(manifest.digest) as lease:
        lease.done.result(60)
        assert len(lease.frames) == 3
        assert content(store, lease) == weights(store, manifest.digest).read_bytes()


def test_concurrent_leases_of_one_adapter_read_it_once(open_store: OpenStore, add: Add) -> None:
    manifests = [add(20_000, seed) for seed in range(3)]
    store = open_store()
    leases = acquired_at_once(store, [manifest.digest for manifest in manifests * 8])
    assert len({lease.extents for lease in leases}) == 3
    for lease in leases:
        lease.done.result(60)
        assert content(store, lease) == weights(store, lease.digest).read_bytes()
        lease.release()
    store.check()


def test_altered_bytes_are_refused_on_the_first_load_and_trusted_afterwards(open_store: OpenStore, add: Add) -> None:
    good, bad = add(5000, 1), add(5000, 2)
    store = open_store()
    path = weights(store, bad.digest)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with store.acquire(bad.digest) as lease, pytest.raises(CheckpointCorrupt, match="has digest"):
        lease.done.result(60)
    assert store.acquire_resident(bad.digest) is None
    with store.acquire(good.digest) as lease:
        lease.done.result(60)
    assert (store.directory(good.digest) / ".verified").exists()
    assert not (store.directory(bad.digest) / ".verified").exists()
    store.check()


def test_a_model_takes_the_frames_of_packs_nobody_holds(open_store: OpenStore, add: Add) -> None:
    adapters = [add(40_000, seed) for seed in range(8)]  # one to a frame
    model = add(7 * 65536 - 8192, 99, CheckpointKind.MODEL)
    store = open_store(num_frames=8)
    for adapter in adapters[1:]:
        store.preload(adapter.digest).result(60)
    held = store.acquire(adapters[0].digest)
    held.done.result(60)
    with store.acquire(model.digest) as lease:
        lease.done.result(60)
        assert content(store, lease) == weights(store, model.digest).read_bytes()
        assert content(store, held) == weights(store, held.digest).read_bytes()
        with pytest.raises(OutOfMemory):
            store.acquire(adapters[1].digest)
    store.check()


def test_an_adapter_that_finds_no_room_ends_no_preload(
    open_store: OpenStore, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file can be read instead; a model's start still ends the preload."""
    adapter, preloaded, started = (
        add(size, seed, kind)
        for seed, (size, kind) in enumerate(
            [(5000, CheckpointKind.ADAPTER), (400_000, CheckpointKind.MODEL), (400_001, CheckpointKind.MODEL)]
        )
    )
    disk, read_into = threading.Event(), WeightsFile.read_into

    def held(self: WeightsFile, view: memoryview, offset: int) -> None:
        assert disk.wait(20)
        read_into(self, view, offset)

    monkeypatch.setattr(WeightsFile, "read_into", held)
    store = open_store(num_frames=len(preloaded.chunk_digests))
    preload = store.preload(preloaded.digest)
    with pytest.raises(OutOfMemory):
        store.acquire(adapter.digest)
    assert not preload.done()
    threading.Timer(0.1, disk.set).start()  # the start waits until what is being read has been
    with store.acquire(started.digest) as lease:
        assert isinstance(preload.exception(60), Cancelled)
        lease.done.result(60)


def test_tenants_never_see_each_other_while_everything_comes_and_goes(open_store: OpenStore, add: Add) -> None:
    draw = random.Random(5)
    manifests = [add(draw.randrange(1, 50_000), seed) for seed in range(30)]
    manifests += [add(draw.randrange(1, 100_000), 100 + seed, CheckpointKind.MODEL) for seed in range(6)]
    store = open_store(num_frames=6)
    files = {digest: weights(store, digest).read_bytes() for digest in (m.digest for m in manifests)}
    wrong: list[Digest] = []

    def work(seed: int) -> None:
        mine = random.Random(seed)
        for _ in range(60):
            digest = mine.choice(manifests).digest
            try:
                lease = store.acquire(digest)
            except OutOfMemory:
                continue
            if mine.random() < 0.3:
                lease.release()
                continue
            try:
                lease.done.result(60)
            except Cancelled:
                continue
            time.sleep(mine.random() * 1e-3)
            if content(store, lease) != files[digest]:
                wrong.append(digest)
            lease.release()
            if mine.random() < 0.2:
                store.evict(digest)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    store.check()

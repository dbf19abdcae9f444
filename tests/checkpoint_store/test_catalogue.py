"""What the store finds on disk, takes in, deletes and accounts for."""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from nearline.checkpoint_store import CheckpointStore, Manifest
from nearline.protocol import Tier
from nearline.protocol.errors import Cancelled, CheckpointCorrupt, ModelNotFound, NearlineError
from tests.checkpoint_store.checkpoints import wait_for

OpenStore = Callable[..., CheckpointStore]


def test_a_restart_finds_what_was_committed_in_order_of_digest(
    root: Path, open_store: OpenStore, checkpoints: ModuleType
) -> None:
    digests = sorted(checkpoints.commit_random(root / "checkpoints", 2, seed).digest for seed in range(4))
    store = open_store()
    assert [m.digest for m in store.checkpoints()] == digests
    store.close()
    assert [m.digest for m in open_store().checkpoints()] == digests


def test_a_new_import_is_served_after_adoption(root: Path, open_store: OpenStore, checkpoints: ModuleType) -> None:
    store = open_store()
    manifest = checkpoints.commit_random(root / "checkpoints", 2, 1)
    assert store.checkpoints() == []
    assert store.adopt(manifest.digest) == manifest
    assert store.adopt(manifest.digest) == manifest
    store.acquire(manifest.digest).done.result(60)


def remove_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def tear_manifest(directory: Path) -> None:
    text = (directory / "manifest.json").read_text()
    (directory / "manifest.json").write_text(text[: len(text) // 2])


def other_version(directory: Path) -> None:
    plain = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(plain | {"format_version": 99}))


def lose_a_digest(directory: Path) -> None:
    plain = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(plain | {"chunk_digests": plain["chunk_digests"][:-1]}))


def no_chunks(directory: Path) -> None:
    plain = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(plain | {"chunk_bytes": 0}))


def shorten(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def remove_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def rename(directory: Path) -> None:
    directory.rename(directory.with_name("somebody-elses-name"))


@pytest.mark.parametrize(
    "damage",
    [remove_manifest, tear_manifest, other_version, lose_a_digest, no_chunks, shorten, remove_weights, rename],
)
def test_a_torn_checkpoint_is_quarantined_and_the_others_are_served(
    damage: Callable[[Path], None], root: Path, open_store: OpenStore, checkpoints: ModuleType
) -> None:
    good, torn = (checkpoints.commit_random(root / "checkpoints", 2, seed) for seed in (1, 2))
    damage(root / "checkpoints" / torn.digest)
    store = open_store()
    assert [m.digest for m in store.checkpoints()] == [good.digest]
    assert len(list((root / "quarantine").iterdir())) == 1
    assert [p.name for p in (root / "checkpoints").iterdir()] == [good.digest]


def test_adopting_a_torn_checkpoint_says_what_is_torn(
    root: Path, open_store: OpenStore, checkpoints: ModuleType
) -> None:
    store = open_store()
    manifest = checkpoints.commit_random(root / "checkpoints", 2, 1)
    shorten(root / "checkpoints" / manifest.digest)
    with pytest.raises(CheckpointCorrupt, match=f"has {manifest.num_bytes - 1} bytes, its manifest says"):
        store.adopt(manifest.digest)


def test_what_a_dead_import_left_is_swept_when_the_store_opens(root: Path, open_store: OpenStore) -> None:
    (root / "incoming" / "model-999999999-1-abcd").mkdir(parents=True)
    open_store()
    assert list((root / "incoming").iterdir()) == []


def test_quarantine_keeps_every_torn_copy(root: Path, open_store: OpenStore, checkpoints: ModuleType) -> None:
    for _ in range(2):
        manifest = checkpoints.commit_random(root / "checkpoints", 2, 1)
        remove_manifest(root / "checkpoints" / manifest.digest)
        open_store().close()
    assert len(list((root / "quarantine").iterdir())) == 2


def test_deleting_an_unused_checkpoint_removes_it_from_disk_and_dram(
    root: Path, open_store: OpenStore, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit_random(root / "checkpoints", 4, 1)
    store = open_store()
    with store.acquire(manifest.digest) as lease:
        lease.done.result(60)
    store.delete(manifest.digest)
    assert list((root / "checkpoints").iterdir()) == []
    assert list((root / "trash").iterdir()) == []
    assert store.dram_free_bytes() == store.dram_pool_bytes
    with pytest.raises(ModelNotFound):
        store.acquire(manifest.digest)


def test_deleting_a_checkpoint_in_use_waits_for_its_last_lease(
    root: Path, open_store: OpenStore, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit_random(root / "checkpoints", 4, 1)
    store = open_store()
    leases = [store.acquire(manifest.digest) for _ in range(2)]
    leases[0].done.result(60)
    store.delete(manifest.digest)
    assert store.checkpoints() == []
    assert store.residency() == ()
    with pytest.raises(ModelNotFound):
        store.acquire(manifest.digest)
    assert (root / "checkpoints" / manifest.digest).exists()
    leases[0].release()
    assert (root / "checkpoints" / manifest.digest).exists()
    leases[1].release()
    assert not (root / "checkpoints" / manifest.digest).exists()
    assert store.dram_free_bytes() == store.dram_pool_bytes


def test_a_checkpoint_imported_again_while_its_deletion_waits_stays(
    root: Path, open_store: OpenStore, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit_random(root / "checkpoints", 4, 1)
    store = open_store()
    lease = store.acquire(manifest.digest)
    store.delete(manifest.digest)
    store.adopt(manifest.digest)
    lease.release()
    assert store.checkpoints() == [manifest]
    store.acquire(manifest.digest).done.result(60)


def test_ssd_account_is_the_lesser_of_budget_and_disk(
    root: Path, open_store: OpenStore, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit_random(root / "checkpoints", 4, 1)
    disk_free = shutil.disk_usage(root).free
    store = open_store(ssd_budget_bytes=10 * manifest.num_bytes)
    assert store.ssd_budget_bytes() == 10 * manifest.num_bytes
    assert store.ssd_used_bytes() == manifest.num_bytes
    assert store.ssd_free_bytes() == min(9 * manifest.num_bytes, disk_free)
    store.close()
    unlimited = open_store()
    assert abs(unlimited.ssd_free_bytes() - disk_free) < 1 << 30
    unlimited.close()
    overfull = open_store(ssd_budget_bytes=1)
    assert overfull.ssd_free_bytes() == 0


def test_a_measurement_made_elsewhere_is_reported(open_store: OpenStore) -> None:
    store = open_store()
    store.observe_bandwidth(Tier.SSD, 10**9, 1.0)
    assert {b.tier: b.bytes_per_s for b in store.bandwidths()}[Tier.SSD] == pytest.approx(1e9)


def test_two_hundred_random_cycles_leak_no_frame_no_descriptor_and_no_thread(
    root: Path, open_store: OpenStore, checkpoints: ModuleType
) -> None:
    manifests = [checkpoints.commit_random(root / "checkpoints", n, n) for n in (1, 3, 6, 9)]
    store, random = open_store(num_frames=12), np.random.default_rng(0)
    num_threads = threading.active_count()
    held, preloads = [], []
    for _ in range(200):
        manifest = manifests[random.integers(len(manifests))]
        action = random.integers(4)
        try:
            if action == 0:
                held.append(store.acquire(manifest.digest))
            elif action == 1 and held:
                held.pop(random.integers(len(held))).release()
            elif action == 2:
                preloads.append(store.preload(manifest.digest))
            else:
                store.evict(manifest.digest)
        except NearlineError as error:
            assert error.code == "out_of_memory"  # noqa: PT017
        store.check()
    for lease in held:
        lease.done.result(60)
        lease.release()
    for preload in preloads:
        assert isinstance(preload.exception(60), Cancelled | None)
    check_all_load(store, manifests)
    assert wait_for(lambda: not are_weights_open()), "a reader closes a file when it has told of its last chunk"
    num_descriptors = len(os.listdir("/proc/self/fd"))
    check_all_load(store, manifests)
    assert wait_for(lambda: not are_weights_open())
    assert len(os.listdir("/proc/self/fd")) == num_descriptors
    assert threading.active_count() <= num_threads


def are_weights_open() -> bool:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            if os.readlink(f"/proc/self/fd/{fd}").endswith("model.safetensors"):
                return True
    return False


def check_all_load(store: CheckpointStore, manifests: list[Manifest]) -> None:
    for manifest in manifests:
        with store.acquire(manifest.digest) as lease:
            lease.done.result(60)
            data = b"".join(bytes(store.pool.frame(frame)) for frame in lease.frames)
            assert data[: manifest.num_bytes] == (store.directory(manifest.digest) / "model.safetensors").read_bytes()
    for manifest in manifests:
        store.evict(manifest.digest)
    assert wait_for(lambda: store.dram_free_bytes() == store.dram_pool_bytes), "also what was cancelled while read"

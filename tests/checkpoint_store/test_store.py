"""The store as a whole: leases, sharing, cancelling, corruption, trust, catalogue, accounts."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from nearline.checkpoint_store import FRAME_FAILED, FRAME_READY, CheckpointStore, Lease, Manifest
from nearline.checkpoint_store.weights_file import WeightsFile
from nearline.protocol import Digest, Tier
from nearline.protocol.errors import Cancelled, CheckpointCorrupt, InvalidRequest, ModelNotFound, OutOfMemory
from tests.checkpoint_store.checkpoints import acquired_at_once, wait_for

OpenStore = Callable[..., CheckpointStore]


@pytest.fixture
def add(root: Path, checkpoints: ModuleType) -> Callable[..., Manifest]:
    """Commit a random checkpoint of n chunks into the store's directory."""

    def commit(num_chunks: int, seed: int = 0) -> Manifest:
        manifest: Manifest = checkpoints.commit_random(root / "checkpoints", num_chunks, seed)
        return manifest

    return commit


def weights(store: CheckpointStore, digest: Digest) -> Path:
    return store.directory(digest) / "model.safetensors"


def content(store: CheckpointStore, lease: Lease) -> bytes:
    num_bytes = store.manifest(lease.digest).num_bytes
    return b"".join(bytes(store.pool.frame(frame)) for frame in lease.frames)[:num_bytes]


def flip(path: Path, at_byte: int) -> None:
    blob = bytearray(path.read_bytes())
    blob[at_byte] ^= 0x10
    path.write_bytes(blob)


# ---- leases ----


def test_a_lease_returns_at_once_and_its_frames_fill_with_the_file(
    open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    manifest = add(5)
    store = open_store()
    lease = store.acquire(manifest.digest)
    stats = lease.done.result(60)
    assert (stats.num_bytes, stats.tier) == (manifest.num_bytes, Tier.SSD)
    assert content(store, lease) == weights(store, manifest.digest).read_bytes()
    assert all(store.pool.ready(frame) == FRAME_READY for frame in lease.frames)


def test_what_is_in_dram_is_leased_without_reading_and_within_a_millisecond(
    open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    manifest = add(10)
    store = open_store()
    with store.acquire(manifest.digest) as first:
        first.done.result(60)
    elapsed = []
    for _ in range(20):
        started_at = time.perf_counter()
        lease = store.acquire(manifest.digest)
        stats = lease.done.result(0)
        elapsed.append(time.perf_counter() - started_at)
        lease.release()
        assert (stats.num_bytes, stats.seconds, stats.tier) == (0, 0.0, Tier.DRAM)
    assert min(elapsed) < 1e-3, "the best of twenty: a busy machine may delay any of them"


def test_many_concurrent_leases_read_each_chunk_once(open_store: OpenStore, add: Callable[..., Manifest]) -> None:
    manifests = [add(6, seed) for seed in range(3)]
    store = open_store(num_frames=18)
    leases = acquired_at_once(store, [manifest.digest for manifest in manifests * 8])
    for lease in leases:
        lease.done.result(60)
        assert content(store, lease) == weights(store, lease.digest).read_bytes()
    assert len({lease.frames for lease in leases}) == 3
    store.check()
    for lease in leases:
        lease.release()
        lease.release()
    assert store.dram_free_bytes() == 0
    assert sum(store.evict(m.digest) for m in manifests) == store.dram_pool_bytes
    assert store.dram_free_bytes() == store.dram_pool_bytes


def test_a_pinned_checkpoint_is_not_evicted_by_request_nor_by_need(
    open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    kept, other = add(6, 1), add(6, 2)
    store = open_store(num_frames=8)
    lease = store.acquire(kept.digest)
    lease.done.result(60)
    assert store.evict(kept.digest) == 0
    with pytest.raises(OutOfMemory, match="needs 6 more frames; of the pool's 8, 2 are free, 0 can be evicted"):
        store.acquire(other.digest)
    assert content(store, lease) == weights(store, kept.digest).read_bytes()
    lease.release()
    store.acquire(other.digest).done.result(60)
    assert [r.dram_bytes > 0 for r in store.residency() if r.digest == kept.digest] == [True]  # partly
    store.check()


def test_releasing_while_reading_cancels_and_returns_the_frames(
    open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    manifest = add(60)
    store = open_store(num_frames=64)
    for _ in range(10):
        lease = store.acquire(manifest.digest)
        lease.release()
        if not (error := lease.done.exception(60)):
            continue  # the reader was faster
        assert isinstance(error, Cancelled)
        store.check()
    assert wait_for(lambda: store.evict(manifest.digest) >= 0 and store.dram_free_bytes() == store.dram_pool_bytes)
    with store.acquire(manifest.digest) as lease:
        lease.done.result(60)
        assert content(store, lease) == weights(store, manifest.digest).read_bytes()


def test_a_checkpoint_of_the_whole_pool_can_follow_a_cancelled_one_at_once(
    open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    first, second = add(16, 1), add(16, 2)
    store = open_store(num_frames=16)
    for _ in range(20):
        store.acquire(first.digest).release()
        with store.acquire(second.digest) as lease:
            lease.done.result(60)
    store.check()


def test_the_frames_of_cancelled_reads_are_waited_for_on_a_slow_disk_too(
    open_store: OpenStore, add: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = add(16, 1), add(16, 2)
    store = open_store(num_frames=16)
    begun, may_go_on, read_into = threading.Event(), threading.Event(), WeightsFile.read_into

    def slowly(self: WeightsFile, view: memoryview, offset: int) -> None:
        begun.set()
        assert may_go_on.wait(60)
        read_into(self, view, offset)

    monkeypatch.setattr(WeightsFile, "read_into", slowly)
    lease = store.acquire(first.digest)
    assert begun.wait(60)
    lease.release()
    threading.Timer(2.0, may_go_on.set).start()
    with store.acquire(second.digest) as lease:
        lease.done.result(60)
    store.check()


def test_preloading_leaves_a_checkpoint_in_dram_unpinned(open_store: OpenStore, add: Callable[..., Manifest]) -> None:
    manifest = add(4)
    store = open_store()
    assert store.preload(manifest.digest).result(60).num_bytes == manifest.num_bytes
    (residency,) = store.residency()
    assert (residency.dram_bytes, residency.ssd_bytes) == (manifest.num_bytes, manifest.num_bytes)
    assert wait_for(lambda: not store.residency()[0].is_pinned)
    assert store.evict(manifest.digest) == 4 * manifest.chunk_bytes


def test_a_preload_makes_room_for_a_start(open_store: OpenStore, add: Callable[..., Manifest]) -> None:
    preloaded, wanted = add(16, 1), add(16, 2)
    store = open_store(num_frames=16)
    for _ in range(20):
        preload = store.preload(preloaded.digest)
        with store.acquire(wanted.digest) as lease:
            lease.done.result(60)
        assert isinstance(preload.exception(60), Cancelled | None)
        store.check()


def test_a_waiter_that_gives_up_does_not_cancel_the_read(open_store: OpenStore, add: Callable[..., Manifest]) -> None:
    manifest = add(4)
    store = open_store()
    lease = store.acquire(manifest.digest)
    assert not lease.done.cancel()
    lease.done.result(60)


def test_chunks_larger_than_a_frame_are_refused_with_the_cure(
    root: Path, open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    manifest = add(2)
    store = open_store(frame_bytes=4096)
    with pytest.raises(OutOfMemory, match="chunks of 65536 bytes, pool frames hold 4096; set frame_bytes"):
        store.acquire(manifest.digest)


# ---- corruption ----


def test_an_altered_byte_fails_the_lease_and_the_frame_and_a_healed_file_loads_again(
    open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    manifest = add(8)
    store = open_store()
    flip(weights(store, manifest.digest), 5 * manifest.chunk_bytes + 9)
    lease = store.acquire(manifest.digest)
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors: chunk 5 \(byte 327680\) has digest"):
        lease.done.result(60)
    assert store.pool.ready(lease.frames[5]) == FRAME_FAILED
    with pytest.raises(CheckpointCorrupt):
        store.acquire(manifest.digest).done.result(60)  # while the failed one is held
    lease.release()
    flip(weights(store, manifest.digest), 5 * manifest.chunk_bytes + 9)
    store.check()


@pytest.mark.parametrize("left", [0, 1, 4096, 65536, 200_000])
def test_a_file_truncated_after_registration_fails_every_waiting_lease(
    left: int, open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    manifest = add(8)
    store = open_store()
    os.truncate(weights(store, manifest.digest), left)
    leases = [store.acquire(manifest.digest) for _ in range(3)]
    for lease in leases:
        with pytest.raises(CheckpointCorrupt, match=f"has {left} bytes, its manifest says {manifest.num_bytes}"):
            lease.done.result(60)
        lease.release()
    store.check()
    assert wait_for(lambda: store.dram_free_bytes() == store.dram_pool_bytes), "reads under way give their frames back"


def test_a_vanished_file_is_named(open_store: OpenStore, add: Callable[..., Manifest]) -> None:
    manifest = add(3)
    store = open_store()
    weights(store, manifest.digest).unlink()
    lease = store.acquire(manifest.digest)
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors has vanished; import the checkpoint again"):
        lease.done.result(60)


def test_a_file_that_vanishes_under_a_loaded_checkpoint_does_not_harm_it(
    open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    manifest = add(3)
    store = open_store()
    blob = weights(store, manifest.digest).read_bytes()
    lease = store.acquire(manifest.digest)
    lease.done.result(60)
    weights(store, manifest.digest).unlink()
    assert content(store, lease) == blob
    assert content(store, store.acquire(manifest.digest)) == blob


def test_a_zero_filled_file_of_the_right_length_is_found_even_after_it_was_trusted(
    open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    manifest = add(3)
    store = open_store()
    store.preload(manifest.digest).result(60)
    assert wait_for(lambda: store.evict(manifest.digest) > 0)
    weights(store, manifest.digest).write_bytes(bytes(manifest.num_bytes))
    with pytest.raises(CheckpointCorrupt, match=r"chunk \d \(byte \d+\) has digest"):
        store.acquire(manifest.digest).done.result(60)


def test_other_checkpoints_load_while_one_is_corrupt(open_store: OpenStore, add: Callable[..., Manifest]) -> None:
    bad, good = add(5, 1), add(5, 2)
    store = open_store()
    flip(weights(store, bad.digest), 10)
    failing, lease = store.acquire(bad.digest), store.acquire(good.digest)
    assert isinstance(failing.done.exception(60), CheckpointCorrupt)
    lease.done.result(60)
    assert content(store, lease) == weights(store, good.digest).read_bytes()


# ---- trust ----


def marker(store: CheckpointStore, digest: Digest) -> Path:
    return store.directory(digest) / ".verified"


def test_the_first_whole_load_leaves_a_marker_and_a_clean_restart_keeps_it(
    open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    manifest = add(3)
    store = open_store()
    assert not marker(store, manifest.digest).exists()
    store.preload(manifest.digest).result(60)
    assert wait_for(marker(store, manifest.digest).exists)
    store.close()
    again = open_store()
    assert marker(again, manifest.digest).exists()


def test_after_a_crash_everything_is_checked_again(
    root: Path, open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    manifest = add(3)
    store = open_store()
    store.verify(manifest.digest)
    assert marker(store, manifest.digest).exists()
    store.close()
    (root / "store.lock").write_text("open by process 1")  # what a killed process leaves
    again = open_store()
    assert not marker(again, manifest.digest).exists()


def test_a_corrupt_load_takes_the_marker_away(open_store: OpenStore, add: Callable[..., Manifest]) -> None:
    manifest = add(3)
    store = open_store()
    store.verify(manifest.digest)
    flip(weights(store, manifest.digest), 70_000)
    assert store.acquire(manifest.digest).done.exception(60)
    assert not marker(store, manifest.digest).exists()


def test_verify_reports_progress_and_names_every_bad_chunk(open_store: OpenStore, add: Callable[..., Manifest]) -> None:
    manifest = add(6)
    store = open_store()
    progress: list[tuple[int, int]] = []
    assert store.verify(manifest.digest, lambda *p: progress.append(p)).num_bytes == manifest.num_bytes
    assert progress[-1] == (manifest.num_bytes, manifest.num_bytes)
    assert len(progress) == 6
    for chunk in (1, 4):
        flip(weights(store, manifest.digest), chunk * manifest.chunk_bytes)
    with pytest.raises(CheckpointCorrupt, match=r"2 of 6 chunks are wrong: chunk 1 .*; chunk 4 "):
        store.verify(manifest.digest)
    assert not marker(store, manifest.digest).exists()


def test_importing_the_store_is_quick_and_the_words_need_none_of_its_libraries() -> None:
    code = (
        "import sys, nearline.checkpoint_store\n"
        "sys.exit(any(m in sys.modules for m in ('structlog', 'psutil', 'torch', 'nearline.checkpoint_store.store')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_second_store_on_the_same_directory_is_refused_by_name(root: Path, open_store: OpenStore) -> None:
    open_store()
    with pytest.raises(InvalidRequest, match=f"is used by another store .open by process {os.getpid()}"):
        open_store()


def test_an_unknown_checkpoint_is_not_found_everywhere(open_store: OpenStore) -> None:
    store, unknown = open_store(), Digest("0" * 32)
    for call in (
        store.acquire,
        store.preload,
        store.evict,
        store.manifest,
        store.directory,
        store.delete,
    ):
        with pytest.raises(ModelNotFound, match="import it first"):
            call(unknown)
    with pytest.raises(ModelNotFound, match="import it first"):
        store.adopt(unknown)

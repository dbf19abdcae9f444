"""The store under an SSD budget: what leaves, what is told of it, how it comes back."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from nearline.checkpoint_store import CheckpointStore, Manifest, write_manifest
from nearline.protocol.errors import NotFound, StorageFull

OpenStore = Callable[..., CheckpointStore]
BUDGET = 700_000


@pytest.fixture
def add(root: Path, checkpoints: ModuleType) -> Callable[..., Manifest]:
    """Commit a checkpoint of about 200 kB from a source."""

    def commit(seed: int, source: str) -> Manifest:
        manifest: Manifest = checkpoints.commit_random(root / "checkpoints", 4, seed)
        manifest = dataclasses.replace(manifest, info=dataclasses.replace(manifest.info, source=source))
        write_manifest(root / "checkpoints" / manifest.digest, manifest)
        return manifest

    return commit


def weights(root: Path, manifest: Manifest) -> Path:
    return root / "checkpoints" / manifest.digest / "model.safetensors"


def test_room_is_made_of_what_can_be_fetched_again_and_is_used_least(
    root: Path, open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    local, often, seldom = add(1, "/models/a"), add(2, "hub:org/b"), add(3, "https://host/c.gguf")
    store = open_store(ssd_budget_bytes=BUDGET)
    for manifest in (often, often, seldom):
        with store.acquire(manifest.digest) as lease:
            lease.done.result(60)
    free = store.ssd_free_bytes()
    assert free == BUDGET - 3 * local.num_bytes
    assert store.make_room(free) == ()
    assert store.make_room(free + 1) == (seldom.digest,)
    assert not weights(root, seldom).exists()
    assert weights(root, often).exists()
    assert store.ssd_free_bytes() == free + seldom.num_bytes
    rows = {row.digest: row for row in store.residency()}
    assert (rows[seldom.digest].ssd_bytes, rows[seldom.digest].dram_bytes) == (0, 0)
    assert rows[seldom.digest].is_fetchable
    assert not rows[local.digest].is_fetchable
    store.check()


def test_what_is_leased_stays_and_a_refusal_evicts_nothing(
    root: Path, open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    used, idle = add(1, "hub:org/a"), add(2, "hub:org/b")
    store = open_store(ssd_budget_bytes=BUDGET)
    with store.acquire(used.digest) as lease:
        lease.done.result(60)
        with pytest.raises(StorageFull, match=r"hub:org/a \(\d+ bytes, in use\)"):
            store.make_room(BUDGET)
        assert weights(root, idle).exists()
        assert store.make_room(BUDGET - used.num_bytes) == (idle.digest,)
    assert store.make_room(BUDGET) == (used.digest,)


def test_an_evicted_checkpoint_says_where_it_comes_from_survives_a_restart_and_comes_back(
    root: Path, open_store: OpenStore, add: Callable[..., Manifest], tmp_path: Path
) -> None:
    manifest = add(1, "hub:org/a")
    copy = shutil.copytree(weights(root, manifest).parent, tmp_path / "copy")
    store = open_store(ssd_budget_bytes=BUDGET)
    store.make_room(BUDGET)
    for ask in (store.acquire, store.preload, store.verify):
        with pytest.raises(NotFound, match=r"evicted from SSD; it comes back from hub:org/a when it is needed"):
            ask(manifest.digest)
    store.close()
    store = open_store(ssd_budget_bytes=BUDGET)
    assert store.is_remote(manifest.digest)
    assert json.loads((store.directory(manifest.digest) / "manifest.json").read_text())
    shutil.rmtree(store.directory(manifest.digest))
    shutil.copytree(copy, store.directory(manifest.digest))
    store.adopt(manifest.digest)
    assert not store.is_remote(manifest.digest)
    store.acquire(manifest.digest).done.result(60)


def test_an_eviction_that_a_crash_cut_short_is_finished_at_the_next_start(
    root: Path, open_store: OpenStore, add: Callable[..., Manifest]
) -> None:
    manifest = add(1, "hub:org/a")
    (weights(root, manifest).parent / ".evicted").touch()
    store = open_store()
    assert store.is_remote(manifest.digest)
    assert not weights(root, manifest).exists()
    store.delete(manifest.digest)
    assert store.residency() == ()


def test_no_byte_is_promised_to_two_imports(root: Path, open_store: OpenStore, add: Callable[..., Manifest]) -> None:
    local, fetchable = add(1, "/models/a"), add(2, "hub:org/b")
    store = open_store(ssd_budget_bytes=BUDGET)
    free = store.ssd_free_bytes()
    first = store.reserve(free)
    assert weights(root, fetchable).exists(), "it fits beside what is there"
    assert store.ssd_free_bytes() == 0
    second = store.reserve(fetchable.num_bytes)
    assert not weights(root, fetchable).exists(), "the second import may have what can be fetched again"
    with pytest.raises(StorageFull, match=rf"needs {local.num_bytes} bytes; of the store's {BUDGET}, 0 are free"):
        store.reserve(local.num_bytes)
    store.give_up(second)
    store.give_up(second)
    store.reserve(fetchable.num_bytes)
    store.give_up(first)
    assert store.ssd_free_bytes() == free

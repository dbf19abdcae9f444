"""A checkpoint known to be damaged is refused until its bytes are right again, across restarts."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from nearline.checkpoint_store import CheckpointStore
from nearline.checkpoint_store.marker import clear_damage, read_damage, write_damage
from nearline.protocol.errors import CheckpointCorrupt

OpenStore = Callable[..., CheckpointStore]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_what_verification_found_damaged_is_refused_until_verification_finds_it_right(
    root: Path, open_store: OpenStore, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit_random(root / "checkpoints", 3, 1)
    weights = root / "checkpoints" / manifest.digest / "model.safetensors"
    store = open_store()
    flip(weights, 70_000)
    with pytest.raises(CheckpointCorrupt, match=r"1 of 3 chunks are wrong: chunk 1 \(byte 65536\)"):
        store.verify(manifest.digest)
    for ask in (store.acquire, store.preload):
        with pytest.raises(CheckpointCorrupt, match=r"found this checkpoint damaged: .*model\.safetensors: .*chunk 1 "):
            ask(manifest.digest)
    store.close()
    store = open_store()
    with pytest.raises(CheckpointCorrupt, match="import it again"):
        store.acquire(manifest.digest)
    flip(weights, 70_000)
    store.verify(manifest.digest)
    store.acquire(manifest.digest).done.result(60)


def test_memory_that_holds_checked_bytes_serves_on_although_the_disk_is_damaged(
    root: Path, open_store: OpenStore, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit_random(root / "checkpoints", 3, 1)
    store = open_store()
    store.preload(manifest.digest).result(60)
    flip(root / "checkpoints" / manifest.digest / "model.safetensors", 70_000)
    with pytest.raises(CheckpointCorrupt):
        store.verify(manifest.digest)
    with store.acquire(manifest.digest) as lease:
        assert lease.done.result(60).num_bytes == 0
    store.evict(manifest.digest)
    with pytest.raises(CheckpointCorrupt):
        store.acquire(manifest.digest)


def test_a_damaged_marker_can_be_missing_and_unwritable(tmp_path: Path) -> None:
    assert read_damage(tmp_path) is None
    clear_damage(tmp_path)
    write_damage(tmp_path / "absent", "torn")
    write_damage(tmp_path, "chunk 1 is wrong")
    assert read_damage(tmp_path) == "chunk 1 is wrong"
    clear_damage(tmp_path)
    assert read_damage(tmp_path) is None

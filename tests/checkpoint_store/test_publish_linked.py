"""A safetensors file served as it is: the same tensors, no byte written twice."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nearline.checkpoint_store import CheckpointStore, StoreConfig
from nearline.checkpoint_store.convert import import_checkpoint
from nearline.checkpoint_store.types import WEIGHTS_NAME, Manifest
from nearline.loader import MappedPool, attach
from nearline.protocol import CheckpointKind, Digest
from nearline.protocol.errors import CheckpointCorrupt, InvalidRequest, NearlineError, UnsupportedCheckpoint
from tests.checkpoint_store.sources import edit_tensors, import_model, leftovers, published

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def source(tiny_llama_dir: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_dir(dtype="bfloat16"), tmp_path / "source"))


def as_is(root: Path, source: Path) -> Manifest:
    return import_model(root, f"as-is:{source}")


def test_the_file_is_linked_and_every_tensor_is_safetensors(root: Path, source: Path) -> None:
    manifest = as_is(root, source)
    assert os.path.samefile(published(root, manifest) / WEIGHTS_NAME, source / WEIGHTS_NAME)
    assert manifest.info.source == f"as-is:{source}"
    assert manifest.digest != import_model(root, source).digest
    assert as_is(root, source) == manifest
    store = CheckpointStore(StoreConfig(root=root, dram_pool_bytes=2**26, touch_ahead_bytes=0))
    pool = MappedPool(store.pool.fd, store.pool.ready_fd, store.pool.layout)
    try:
        with store.acquire(manifest.digest) as lease:
            lease.done.result(60)
            loaded = attach(pool, published(root, manifest), lease.frames, "cpu")
            oracle = load_file(source / WEIGHTS_NAME)
            assert set(loaded.names()) == set(oracle)
            for name, tensor in oracle.items():
                assert torch.equal(loaded.tensor(name), tensor)
            names = [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
            assert torch.equal(loaded.fused(names), torch.cat([oracle[name] for name in names]))
            del tensor, oracle
            loaded.close()
        shutil.rmtree(source)
        store.evict(manifest.digest)
        assert store.verify(manifest.digest).num_bytes == manifest.num_bytes
    finally:
        pool.close()
        store.close()


@pytest.mark.parametrize("pad", range(1, 9))
def test_data_that_starts_at_any_byte_is_served(root: Path, source: Path, pad: int) -> None:
    blob = (source / WEIGHTS_NAME).read_bytes()
    length = int.from_bytes(blob[:8], "little")
    header = blob[8 : 8 + length] + b" " * pad
    (source / WEIGHTS_NAME).write_bytes(len(header).to_bytes(8, "little") + header + blob[8 + length :])
    manifest = as_is(root, source)
    store = CheckpointStore(StoreConfig(root=root, dram_pool_bytes=2**26, touch_ahead_bytes=0))
    pool = MappedPool(store.pool.fd, store.pool.ready_fd, store.pool.layout)
    try:
        with store.acquire(manifest.digest) as lease:
            loaded = attach(pool, published(root, manifest), lease.frames, "cpu")
            oracle = load_file(source / WEIGHTS_NAME)
            for name in oracle:
                loaded.wait_for([name])
                assert torch.equal(loaded.tensor(name), oracle[name])
            loaded.close()
    finally:
        pool.close()
        store.close()


def refused(root: Path, source: Path, error: type[NearlineError]) -> str:
    with pytest.raises(error) as caught:
        as_is(root, source)
    assert leftovers(root) == []
    return caught.value.message


def test_another_file_system_is_refused_with_the_cure(root: Path, source: Path) -> None:
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(root).st_dev:
        pytest.skip("needs a second file system")
    elsewhere = Path("/dev/shm") / f"nearline-test-{os.getpid()}"
    try:
        shutil.copytree(source, elsewhere)
        message = refused(root, elsewhere, InvalidRequest)
    finally:
        shutil.rmtree(elsewhere, ignore_errors=True)
    assert "it lies on another file system" in message
    assert "leave --no-convert out" in message


def test_shards_and_tensors_under_other_names_need_conversion(root: Path, source: Path) -> None:
    tensors = load_file(source / WEIGHTS_NAME)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, source / WEIGHTS_NAME)
    assert "leave --no-convert out" in refused(root, source, UnsupportedCheckpoint)
    (source / WEIGHTS_NAME).unlink()
    shards = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    save_file(tensors, source / "model-00001-of-00001.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "weights in shards cannot be served as they are" in refused(root, source, UnsupportedCheckpoint)


def test_what_a_conversion_refuses_is_refused_and_an_adapter_or_a_file_too(root: Path, source: Path) -> None:
    edit_tensors(source, **{Q_PROJ: None})
    assert Q_PROJ in refused(root, source, CheckpointCorrupt)
    with pytest.raises(UnsupportedCheckpoint, match="only a model's safetensors directory"):
        import_checkpoint(root, CheckpointKind.ADAPTER, f"as-is:{source}", Digest("0" * 32))
    with pytest.raises(UnsupportedCheckpoint, match=r"only a local directory .*; leave --no-convert out"):
        import_model(root, "as-is:hub:org/name")


def test_a_source_that_is_written_to_later_is_noticed(root: Path, source: Path) -> None:
    manifest = as_is(root, source)
    with (source / WEIGHTS_NAME).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    store = CheckpointStore(StoreConfig(root=root, dram_pool_bytes=2**26, touch_ahead_bytes=0))
    try:
        with store.acquire(manifest.digest) as lease, pytest.raises(CheckpointCorrupt, match="the bytes were altered"):
            lease.done.result(60)
    finally:
        store.close()

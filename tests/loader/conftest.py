"""A store of tiny frames, checkpoints written without the importer, and the pool as an engine would map it."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nearline.checkpoint_store import CheckpointStore, StoreConfig
from nearline.loader import MappedPool


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two busy torch threads on a shared machine make tests slow, and none needs them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoints() -> ModuleType:
    """The helper module of the store's tests."""
    name = "nearline_test_checkpoints"
    path = Path(__file__).parent.parent / "checkpoint_store" / "checkpoints.py"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec
        assert spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


@pytest.fixture
def open_store(root: Path, checkpoints: ModuleType) -> Iterator[Callable[..., CheckpointStore]]:
    """Open the store after checkpoints were committed; closed at the end of the test."""
    opened: list[CheckpointStore] = []

    def make(num_frames: int = 64, frame_bytes: int = checkpoints.TINY_CHUNK) -> CheckpointStore:
        size = num_frames * frame_bytes
        config = StoreConfig(root=root, dram_pool_bytes=size, frame_bytes=frame_bytes, touch_ahead_bytes=0)
        opened.append(CheckpointStore(config))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def map_pool() -> Iterator[Callable[[CheckpointStore], MappedPool]]:
    opened: list[MappedPool] = []

    def make(store: CheckpointStore) -> MappedPool:
        opened.append(MappedPool(store.pool.fd, store.pool.ready_fd, store.pool.layout))
        return opened[-1]

    yield make
    for pool in opened:
        pool.close()

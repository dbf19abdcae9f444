"""Small committed checkpoints, written without the importer, and a store of tiny frames."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from nearline.checkpoint_store import CheckpointStore, StoreConfig


def _module() -> ModuleType:
    name, path = "nearline_test_checkpoints", Path(__file__).with_name("checkpoints.py")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec
        assert spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def checkpoints() -> ModuleType:
    """The module checkpoints.py: `commit`, `commit_random`, `random_bytes`, TINY_CHUNK."""
    return _module()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


@pytest.fixture
def open_store(root: Path, checkpoints: ModuleType) -> Iterator[Callable[..., CheckpointStore]]:
    """Open a store on `root` with a pool of `num_frames` tiny frames; closed at the end of the test."""
    opened: list[CheckpointStore] = []

    def make(num_frames: int = 16, **overrides: object) -> CheckpointStore:
        tiny = checkpoints.TINY_CHUNK
        settings = {"dram_pool_bytes": num_frames * tiny, "frame_bytes": tiny, "touch_ahead_bytes": 0} | overrides
        opened.append(CheckpointStore(StoreConfig(root=root, **settings)))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for store in opened:
        store.close()

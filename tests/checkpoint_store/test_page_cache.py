"""What the page cache holds is told without reading it."""

import os
from pathlib import Path

import pytest

from nearline.checkpoint_store.page_cache import is_cached

MIB = 1024 * 1024


@pytest.fixture
def descriptor(tmp_path: Path) -> int:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 * MIB))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return descriptor


def test_only_what_was_read_is_there_and_asking_reads_nothing(descriptor: int) -> None:
    if is_cached(descriptor, 0, 4 * MIB):
        pytest.skip("this file system lives in memory")
    for _ in range(3):
        assert not is_cached(descriptor, MIB, MIB)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    assert len(os.pread(descriptor, MIB, MIB)) == MIB
    assert is_cached(descriptor, MIB, MIB)
    assert is_cached(descriptor, MIB + 1234, 5678)
    assert not is_cached(descriptor, 0, 4 * MIB)


def test_a_range_beyond_the_end_is_refused(descriptor: int) -> None:
    with pytest.raises(ValueError, match="length"):
        is_cached(descriptor, 3 * MIB, 2 * MIB)

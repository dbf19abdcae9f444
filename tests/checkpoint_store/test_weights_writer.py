"""What is written is on disk to the byte."""

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from nearline.checkpoint_store.weights_writer import WeightsWriter

PIECE = 8 * 1024 * 1024


def blocks_of(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        for size in sizes:
            yield data[start : start + size]
            start += size


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 12345])
@pytest.mark.parametrize("folder", ["disk", "/dev/shm"])
def test_a_file_of_any_length_is_on_disk_to_the_byte(tmp_path: Path, folder: str, num_bytes: int) -> None:
    path = tmp_path / "w" if folder == "disk" else Path(folder) / f"nearline-test-{os.getpid()}-{num_bytes}"
    data = np.random.default_rng(num_bytes).bytes(num_bytes)
    writer = WeightsWriter(path)
    try:
        for block in blocks_of(data, (1, 999_983, 3 * 4096)):
            writer.write(block)
        writer.finish()
        assert path.read_bytes() == data
    finally:
        writer.close()
        path.unlink()


def test_a_write_that_fails_is_raised_to_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = os.pwritev

    def full(fd: int, views: list[memoryview], offset: int) -> int:
        if offset >= PIECE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", full)
    writer = WeightsWriter(tmp_path / "w")
    try:
        writer.write(os.urandom(2 * PIECE))
        with pytest.raises(OSError, match="No space left"):
            writer.finish()
    finally:
        writer.close()


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        WeightsWriter(tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == b"mine"

"""Reading a weights file: whole or an error, whatever the lengths and the file system."""

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nearline.checkpoint_store.weights_file import WeightsFile, check_digest
from nearline.protocol.errors import CheckpointCorrupt

ODD_LENGTHS = [1, 511, 512, 513, 4095, 4096, 4097, 8191, 65536, 65537, 70_000]


@pytest.fixture(params=["disk", "tmpfs"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    shared = Path("/dev/shm") / f"nearline-test-{os.getpid()}"
    shared.mkdir()
    yield shared
    for path in shared.iterdir():
        path.unlink()
    shared.rmdir()


def read(file: WeightsFile, num_bytes: int, offset: int = 0) -> bytes:
    with mmap.mmap(-1, max(num_bytes, 1)) as buffer:
        with memoryview(buffer) as view, view[:num_bytes] as part:
            file.read_into(part, offset)
        return buffer[:num_bytes]


@pytest.mark.parametrize("num_bytes", ODD_LENGTHS)
def test_every_length_reads_back_byte_for_byte(directory: Path, num_bytes: int) -> None:
    data = np.random.default_rng(num_bytes).bytes(num_bytes)
    (directory / "w").write_bytes(data)
    file = WeightsFile(directory / "w", num_bytes)
    assert read(file, num_bytes) == data
    if num_bytes > 4096:
        assert read(file, num_bytes - 4096, 4096) == data[4096:]
    file.close()


def test_a_file_system_without_direct_io_is_read_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w").write_bytes(b"x" * 8192)
    real_open = os.open

    def refuse_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse_direct)
    file = WeightsFile(tmp_path / "w", 8192)
    assert not file.is_direct
    assert file.refusal == "Invalid argument"
    assert read(file, 8192) == b"x" * 8192
    file.close()


def test_a_buffer_direct_io_refuses_is_filled_all_the_same(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(12_288)
    (tmp_path / "w").write_bytes(data)
    file = WeightsFile(tmp_path / "w", len(data))
    buffer = bytearray(len(data) + 1)
    file.read_into(memoryview(buffer)[1:], 0)  # an odd address
    assert bytes(buffer[1:]) == data
    file.close()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"gone/w has vanished; import"):
        WeightsFile(tmp_path / "gone" / "w", 10)


@pytest.mark.parametrize("actual", [0, 1, 4096, 8191, 8193])
def test_a_file_of_another_size_is_refused_with_both_sizes(tmp_path: Path, actual: int) -> None:
    (tmp_path / "w").write_bytes(b"x" * actual)
    with pytest.raises(CheckpointCorrupt, match=f"has {actual} bytes, its manifest says 8192"):
        WeightsFile(tmp_path / "w", 8192)


@pytest.mark.parametrize("left", [0, 1, 4095, 4096, 4097, 8191])
def test_a_file_truncated_while_open_is_an_error_and_never_zeros(tmp_path: Path, left: int) -> None:
    (tmp_path / "w").write_bytes(b"x" * 8192)
    file = WeightsFile(tmp_path / "w", 8192)
    os.truncate(tmp_path / "w", left)
    with pytest.raises(CheckpointCorrupt, match=f"ends at byte {left}, expected 8192"):
        read(file, 8192)
    file.close()


def test_a_file_replaced_while_open_is_still_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"a" * 8192)
    file = WeightsFile(tmp_path / "w", 8192)
    (tmp_path / "new").write_bytes(b"b" * 8192)
    (tmp_path / "new").rename(tmp_path / "w")
    assert read(file, 8192) == b"a" * 8192
    other = WeightsFile(tmp_path / "w", 8192)
    assert other.stamp != file.stamp
    file.close()
    other.close()


def test_a_wrong_digest_names_both() -> None:
    with pytest.raises(CheckpointCorrupt, match=r"here has digest 99aa06d3014798d86001c324468d497f, .* says 00"):
        check_digest(memoryview(b""), "00", "here")

"""Reading tensors from files that are whole, torn, or changed while we look."""

from pathlib import Path

import pytest

from nearline.checkpoint_store.safetensors_file import open_safetensors
from nearline.protocol.errors import CheckpointCorrupt
from tests.checkpoint_store.sources import random_f32, write_raw


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_raw(path, {"a": random_f32((64, 64)), "b": random_f32((3000,), seed=1), "empty": ("F32", (0, 4), b"")})
    return path


def test_tensors_read_as_the_bytes_that_were_written(file: Path) -> None:
    tensors = open_safetensors(file)
    for name, raw in {"a": random_f32((64, 64)), "b": random_f32((3000,), seed=1)}.items():
        assert (tensors[name].entry.dtype, tensors[name].entry.shape) == raw[:2]
        assert b"".join(bytes(block) for block in tensors[name].blocks()) == raw[2]
    assert list(tensors["empty"].blocks()) == []


@pytest.mark.parametrize("lost", [1, 4096, 14_000, 28_384, 28_700, 10**9])
def test_a_file_cut_short_is_refused_with_both_sizes(file: Path, lost: int) -> None:
    whole = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(max(whole - lost, 0))
    with pytest.raises(CheckpointCorrupt) as caught:
        open_safetensors(file)
    assert str(file) in caught.value.message
    assert str(max(whole - lost, 0)) in caught.value.message


def test_a_file_cut_short_after_it_was_opened_is_noticed_when_it_is_read(file: Path) -> None:
    tensors = open_safetensors(file)
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 5000)
    with pytest.raises(CheckpointCorrupt, match=r"'b' ends after 7000 of 12000 bytes; is the file being changed\?"):
        list(tensors["b"].blocks())

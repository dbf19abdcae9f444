"""Shards and an index that may lie."""

import json
from pathlib import Path
from typing import Any

import pytest

from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.safetensors_shards import INDEX_NAME, open_weights
from nearline.checkpoint_store.source_directory import SourceDirectory
from nearline.protocol.errors import CheckpointCorrupt, InvalidRequest, UnsupportedCheckpoint
from tests.checkpoint_store.sources import random_f32, write_raw

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_raw(tmp_path / SHARDS[0], {"a": random_f32((4, 4)), "b": random_f32((4,), 1)})
    write_raw(tmp_path / SHARDS[1], {"c": random_f32((4, 4), 2)})
    write_index(tmp_path, {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]})
    return tmp_path


def write_index(directory: Path, weight_map: Any, total_size: Any = 144) -> None:
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index))


def open_all(source: Path) -> tuple[dict[str, Path], list[str]]:
    warnings: list[str] = []
    stored = open_weights(SourceDirectory(source), Reporter(warn=warnings.append))
    return {name: tensor.path for name, tensor in stored.items()}, warnings


def test_an_honest_index_opens_without_a_word(source: Path) -> None:
    paths = {"a": source / SHARDS[0], "b": source / SHARDS[0], "c": source / SHARDS[1]}
    assert open_all(source) == (paths, [])


def test_a_single_file_wins_over_an_index_as_in_transformers(source: Path) -> None:
    write_raw(source / "model.safetensors", {"z": random_f32((1,))})
    assert open_all(source)[0] == {"z": source / "model.safetensors"}


def test_a_missing_shard_is_named_with_a_tensor_that_needs_it(source: Path) -> None:
    (source / SHARDS[1]).unlink()
    with pytest.raises(CheckpointCorrupt, match=rf"shard {SHARDS[1]} is missing, .* needs it for 'c'"):
        open_all(source)


def test_a_tensor_its_shard_lacks_is_named(source: Path) -> None:
    write_index(source, {"a": SHARDS[0], "c": SHARDS[0]})
    with pytest.raises(CheckpointCorrupt, match=rf"{SHARDS[0]}: tensor 'c' is not in this shard"):
        open_all(source)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "x/../../outside.safetensors"])
def test_an_index_that_points_outside_is_refused(source: Path, shard: str) -> None:
    write_raw(source.parent / "outside.safetensors", {"a": random_f32((4, 4))})
    write_index(source, {"a": shard})
    with pytest.raises(InvalidRequest, match="not a name inside the source directory"):
        open_all(source)


def test_unlisted_tensors_and_a_wrong_total_are_warned_about(source: Path) -> None:
    write_index(source, {"a": SHARDS[0], "c": SHARDS[1]}, total_size=7)
    paths, warnings = open_all(source)
    assert set(paths) == {"a", "c"}
    assert "ignored: b" in warnings[0]
    assert "claims 7 bytes of tensors, the shards hold 128" in warnings[1]


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": None}])
def test_an_index_of_the_wrong_kind_is_refused(source: Path, weight_map: Any) -> None:
    write_index(source, weight_map)
    with pytest.raises(CheckpointCorrupt, match="weight_map is not a map"):
        open_all(source)


def test_shards_without_an_index_and_an_empty_directory_are_refused(source: Path, tmp_path: Path) -> None:
    (source / INDEX_NAME).unlink()
    with pytest.raises(UnsupportedCheckpoint, match=SHARDS[0]):
        open_all(source)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UnsupportedCheckpoint, match="a model needs safetensors weights"):
        open_all(tmp_path / "nothing")

"""The strict header reader agrees with the safetensors library wherever a file is good, and never accepts more."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from nearline.checkpoint_store.safetensors_header import (
    DTYPE_BITS,
    build_header,
    header_length,
    parse_header,
    tensor_bytes,
)
from nearline.checkpoint_store.types import TensorEntry
from nearline.protocol.errors import CheckpointCorrupt

WHOLE = sorted(dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
layouts = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(WHOLE), shapes),
    max_size=6,
)


def parse(blob: bytes) -> dict[str, TensorEntry]:
    length = header_length(blob[:8], len(blob), "a.safetensors")
    return parse_header(blob[8 : 8 + length], len(blob), "a.safetensors")


@given(layouts)
def test_what_is_built_reads_back_and_opens_with_the_safetensors_library(layout: dict[str, Any]) -> None:
    prefix, entries = build_header([(name, dtype, shape) for name, (dtype, shape) in layout.items()])
    blob = prefix + bytes(i % 251 for i in range(sum(entry.num_bytes for entry in entries)))
    assert len(prefix) % 4096 == 0
    assert parse(blob) == {entry.name: entry for entry in entries}
    theirs = {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in deserialize(blob)}
    ours = {e.name: (e.dtype, e.shape, blob[e.offset : e.offset + e.num_bytes]) for e in entries}
    assert theirs == ours


@settings(max_examples=300)
@given(layouts, st.data())
def test_a_damaged_header_is_refused_whenever_the_library_refuses_it(layout: dict[str, Any], data: Any) -> None:
    prefix, entries = build_header([(name, dtype, shape) for name, (dtype, shape) in layout.items()])
    blob = bytearray(prefix + bytes(sum(entry.num_bytes for entry in entries)))
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, min(len(blob) - 1, 200)))] = data.draw(st.integers(0, 255))
    try:
        ours = parse(bytes(blob))
    except CheckpointCorrupt:
        return
    theirs = {name: tuple(info["shape"]) for name, info in deserialize(bytes(blob))}
    assert {name: entry.shape for name, entry in ours.items()} == theirs


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_the_library_knows_has_its_size(dtype: str) -> None:
    prefix, (entry,) = build_header([("t", dtype, (4, 8))])
    (name, info), = deserialize(prefix + bytes(entry.num_bytes))  # fmt: skip
    assert (name, info["dtype"], info["shape"]) == ("t", dtype, [4, 8])
    assert entry.num_bytes == tensor_bytes(dtype, (4, 8)) == 32 * DTYPE_BITS[dtype] // 8


@pytest.mark.parametrize("size", [4087, 4088, 4089, 65_528, 65_536, 99_993, 99_994, 99_999, 100_000, 10**6])
def test_header_sizes_around_buffer_boundaries_read_whole(size: int) -> None:
    bare = len(json.dumps({"__metadata__": {"pad": ""}, "t": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}))
    header = {"__metadata__": {"pad": "x" * (size - bare)}, "t": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}
    raw = json.dumps(header).encode()
    assert len(raw) == size
    assert parse(len(raw).to_bytes(8, "little") + raw + b"abc")["t"].offset == 8 + size


def blob_of(header: Any, data: bytes = b"") -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


TENSOR = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (b"", "0 bytes, too short"),
        (b"\x01\x02", "2 bytes, too short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ((2**40).to_bytes(8, "little") + b"{}", "header of 1099511627776 bytes"),
        ((99).to_bytes(8, "little") + b"{}", "10 bytes, the header alone needs 107"),
        (blob_of([1]), "not valid JSON"),
        (blob_of({"w": TENSOR}, b"a"), "truncated at tensor 'w': it ends at byte"),
        (blob_of({"w": TENSOR}, b"abc"), "its tensors end at"),
        (blob_of({"v": TENSOR, "w": TENSOR}, b"ab"), "'w' overlaps"),
        (blob_of({"w": {**TENSOR, "data_offsets": [1, 3]}}, b"abc"), "'w' leaves a hole"),
        (blob_of({"w": {**TENSOR, "shape": [3]}}, b"ab"), "needs 3 bytes, its offsets hold 2"),
        (blob_of({"w": {**TENSOR, "dtype": "Q7"}}, b"ab"), "unknown dtype 'Q7'"),
        (blob_of({"w": {**TENSOR, "shape": [-2]}}, b"ab"), "whole numbers"),
        (blob_of({"w": {**TENSOR, "shape": [2.0]}}, b"ab"), "whole numbers"),
        (blob_of({"w": {**TENSOR, "shape": [2**62, 2**62]}}, b"ab"), "beyond any file"),
        (blob_of({"w": {"dtype": "U8"}}, b"ab"), "'w' is badly described; a dtype, a shape and two data_offsets"),
        (blob_of({"w": None}, b"ab"), "'w' is badly described; a dtype"),
        (blob_of({"w": {**TENSOR, "dtype": ["U8"]}}, b"ab"), "'w' is badly described; a dtype"),
        (blob_of({"w": {**TENSOR, "shape": 2}}, b"ab"), "'w' is badly described; a dtype"),
        (blob_of({"w": {**TENSOR, "data_offsets": [0, 1, 2]}}, b"ab"), "'w' is badly described; a dtype"),
        (blob_of({"__metadata__": {"a": 1}}), "__metadata__"),
        ((12).to_bytes(8, "little") + b'{"a":1,"a":2', "not valid JSON"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_its_numbers(blob: bytes, words: str) -> None:
    with pytest.raises(CheckpointCorrupt) as caught:
        parse(blob)
    assert words in caught.value.message
    assert caught.value.message.startswith("a.safetensors: ")
    with pytest.raises(SafetensorError):
        deserialize(blob)


def test_a_name_given_twice_is_refused() -> None:
    raw = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    with pytest.raises(CheckpointCorrupt, match="occurs twice"):
        parse(len(raw).to_bytes(8, "little") + raw + b"a")

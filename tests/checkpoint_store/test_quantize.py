"""Quantised imports: what codes stand for is close, group by group; sources of every kind; nothing torn stays."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.quantize_codes import decode, encode
from nearline.checkpoint_store.store import CheckpointStore
from nearline.protocol import QUANT_FORMATS, CheckpointKind, Digest
from nearline.protocol.errors import Cancelled, CheckpointCorrupt, InvalidRequest
from tests.checkpoint_store.sources import edit_tensors, import_model, published, read_raw

BOTH = pytest.mark.parametrize("name", list(QUANT_FORMATS))
UP = "model.layers.1.mlp.up_proj.weight"


def spread(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Weights of every size, with groups that are zero, constant, one-sided and of a single outlier."""
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    values *= np.exp(np.random.default_rng(1).uniform(-8, 2, (rows, 1))).astype(np.float32)
    values[0] = 0
    values[1 % rows] = 0.3
    values[2 % rows] = np.abs(values[2 % rows]) + 1
    values[3 % rows, columns // 2] = 40
    return values


@BOTH
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (1, 1), (33, 100), (40, 65)])
def test_every_weight_is_within_half_a_step_of_its_group(name: str, rows: int, columns: int) -> None:
    wanted, values = QUANT_FORMATS[name], spread(rows, columns)
    coded = encode(values, wanted)
    found = decode((coded.codes, coded.scales, coded.offsets), wanted, (rows, columns))
    assert coded.codes.shape == wanted.code_shape((rows, columns))
    assert coded.scales.shape == wanted.scale_shape((rows, columns))
    for row in range(rows):
        for first in range(0, columns, wanted.group):
            group, back = values[row, first : first + wanted.group], found[row, first : first + wanted.group]
            if wanted.has_offsets:  # the bound of codes spread between the extremes, padding zeros among them
                padded = np.append(group, [0] * (wanted.group - len(group)))
                extremes = (padded.max() - padded.min()) / 15 * 0.5 + np.abs(padded).max() / 256
                assert np.square(back - group).sum() <= wanted.group * extremes**2 * 1.01 + 1e-12
            else:
                assert np.abs(back - group).max() <= np.abs(group).max() / 127 * 0.51 + 1e-12
    assert coded.squared_error >= float(np.square(found - values, dtype=np.float64).sum()) * 0.999 - 1e-9


@BOTH
def test_an_import_says_what_it_lost_tensor_by_tensor(
    name: str, root: Path, tiny_llama_dir: Callable[..., Path]
) -> None:
    source = tiny_llama_dir(hidden_size=64, intermediate_size=96, dtype="bfloat16")
    manifest = import_model(root, f"{name}:{source}")
    assert (manifest.info.quantization, manifest.info.source) == (name, f"{name}:{source}")
    directory = published(root, manifest)
    report = json.loads((directory / "quantization.json").read_text())
    stored = read_raw(directory / "model.safetensors")
    wanted = QUANT_FORMATS[name]
    with safe_open(source / "model.safetensors", "pt") as file:
        original = file.get_tensor(UP).float().numpy()
    parts: Any = [
        np.frombuffer(stored[n][2], np.uint8 if i == 0 else np.uint16) for i, n in enumerate(wanted.names([UP]))
    ]
    found = decode((parts[0], parts[1], parts[2] if wanted.has_offsets else None), wanted, original.shape)
    error = math.sqrt(np.square(found - original).sum() / np.square(original).sum())
    assert report["tensors"][UP]["relative_error"] == pytest.approx(error, rel=1e-3)
    assert 0 < manifest.info.quantization_error < (0.01 if name == "int8" else 0.12)
    assert report["relative_error"] == pytest.approx(manifest.info.quantization_error)
    assert stored["model.layers.0.input_layernorm.weight"][0] == "BF16"


@BOTH
def test_codes_of_fused_projections_are_adjacent_and_so_are_their_scales(
    name: str, root: Path, tiny_llama_dir: Callable[..., Path]
) -> None:
    manifest = import_model(root, f"{name}:{tiny_llama_dir(hidden_size=64)}")
    entries = {entry.name: entry for entry in manifest.tensors}
    suffixes = ("", "_scale", "_offset") if name == "int4" else ("", "_scale")
    for suffix in suffixes:
        q, k, v = (entries[f"model.layers.0.self_attn.{p}_proj.weight{suffix}"] for p in "qkv")
        assert (q.offset + q.num_bytes, k.offset + k.num_bytes) == (k.offset, v.offset)


def test_the_same_source_and_format_give_the_same_checkpoint_and_another_format_another(
    root: Path, tiny_llama_dir: Callable[..., Path]
) -> None:
    source = tiny_llama_dir(hidden_size=64)
    digests = [import_model(root, f"{prefix}{source}").digest for prefix in ("int8:", "int8:", "int4:", "")]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_gguf_in_four_bits_comes_back_in_four_bits_as_it_was(root: Path, smollm2_gguf: Path) -> None:
    info = import_model(root, f"int4:{smollm2_gguf}").info
    assert info.num_bytes < 107_000_000
    assert info.quantization_error < 0.01, "its blocks of 32 are our groups"


def test_weights_that_are_not_finite_are_refused_by_name(root: Path, tiny_llama_dir: Callable[..., Path]) -> None:
    source = tiny_llama_dir(hidden_size=64)
    kind, shape, raw = read_raw(source / "model.safetensors")[UP]
    values = np.frombuffer(raw, "<f4").copy()
    values[7] = np.inf
    edit_tensors(source, **{UP: (kind, shape, values.tobytes())})
    with pytest.raises(CheckpointCorrupt, match=UP):
        import_model(root, f"int8:{source}")
    assert not list((root / "incoming").iterdir())


def test_what_cannot_be_quantised_is_refused_with_the_cure(root: Path, tiny_llama_dir: Callable[..., Path]) -> None:
    source = tiny_llama_dir(hidden_size=64)
    with pytest.raises(InvalidRequest, match="leave --quantize int8 out"):
        import_model(root, f"int8:as-is:{source}")
    with pytest.raises(InvalidRequest, match="an adapter cannot be quantised"):
        import_checkpoint(root, CheckpointKind.ADAPTER, f"int4:{source}", Digest("0" * 32))


@pytest.mark.parametrize("after", [1, 3, 9])
def test_an_import_that_ends_half_way_leaves_nothing(
    after: int, root: Path, tiny_llama_dir: Callable[..., Path]
) -> None:
    source = tiny_llama_dir(hidden_size=64)
    calls = 0

    def stop(phase: str, done_bytes: int, total_bytes: int) -> None:
        nonlocal calls
        calls += phase == "writing"
        if calls >= after:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        import_checkpoint(root, CheckpointKind.MODEL, f"int4:{source}", reporter=Reporter(progress=stop))
    assert not list((root / "incoming").iterdir())
    assert not list((root / "checkpoints").iterdir())


def test_a_quantised_model_from_the_hub_may_be_evicted_from_disk_as_its_source_may(
    root: Path, tiny_llama_dir: Callable[..., Path], open_store: Callable[..., CheckpointStore]
) -> None:
    local = import_model(root, f"int8:{tiny_llama_dir(hidden_size=64)}")
    store = open_store()
    assert not store._stored(local).is_fetchable
    path = published(root, local) / "manifest.json"
    plain = json.loads(path.read_text())
    plain["info"]["source"] = "int8:hub:org/name"
    path.write_text(json.dumps(plain))
    store.close()
    again = open_store()
    assert again._stored(again.manifest(local.digest)).is_fetchable

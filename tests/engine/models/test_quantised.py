"""Weights of 8 and 4 bits all the way: imported, loaded, run; the oracle is transformers on what they stand for."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.checkpoint_store.quantize_codes import decode
from nearline.engine.runner import Runner, RunnerConfig
from nearline.loader import load_directory
from nearline.protocol import (
    QUANT_FORMATS,
    CheckpointKind,
    DecoderSpec,
    Digest,
    coded_shape,
    decoder_spec,
    format_of,
    tensor_slots,
)
from nearline.protocol.errors import CheckpointCorrupt, UnsupportedCheckpoint
from nearline.protocol.quantization import is_turned

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "Qwen3": {},
    "Phi3": {},
    "Gemma3": {"sliding_window": 8},
    "GPT2": {},
    "OPT": {"ffn_dim": 112},
}
BOTH = pytest.mark.parametrize("name", list(QUANT_FORMATS))
Import = Callable[..., Path]


@pytest.fixture
def quantise(tmp_path: Path, tiny_tokenizer_json: Any) -> Import:
    """Save a transformers model, import it quantised, and make its weights those the codes stand for."""

    def run(model: Any, name: str) -> Path:
        source = tmp_path / "source"
        model.save_pretrained(source, max_shard_size="60KB")
        (source / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json))
        digest = import_checkpoint(tmp_path, CheckpointKind.MODEL, f"{name}:{source}").digest
        directory = tmp_path / "checkpoints" / digest
        put_back(model, directory)
        return directory

    return run


def spec_of(directory: Path) -> DecoderSpec:
    return decoder_spec(json.loads((directory / "config.json").read_text()))


def put_back(model: Any, directory: Path) -> None:
    """Give a model the weights that a quantised checkpoint stands for; at least its projections must be coded."""
    spec = spec_of(directory)
    stored = read_bits(directory)
    state, num_coded = model.state_dict(), 0
    for slot in tensor_slots(spec):
        shape = coded_shape(slot, spec)
        wanted = format_of(shape, stored[slot.name].shape) if stored[slot.name].dtype == np.uint8 else None
        if wanted is None:
            continue
        num_coded += 1
        parts = [stored[name] for name in wanted.names([slot.name])]
        codes, scales, *offsets = (part if part.dtype == np.uint8 else bits16(part) for part in parts)
        values = decode((codes, scales, offsets[0] if offsets else None), wanted, (shape[0], shape[1]))
        values = values.T if is_turned(slot, spec) else values
        state[slot.name].copy_(torch.from_numpy(values.copy()))
    assert num_coded >= 2 * spec.num_layers


def read_bits(directory: Path) -> dict[str, Any]:
    loaded = load_directory(directory, "cpu")
    plain = {n: loaded.tensor(n) for n in loaded.names()}
    return {n: (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).numpy() for n, t in plain.items()}


def bits16(part: Any) -> Any:
    return part.view(np.uint16) if part.dtype.itemsize == 2 else part


def bound(directory: Path, make_harness: Any, **config: Any) -> Any:
    weights = load_directory(directory, "cpu")
    return make_harness(weights, Runner(weights, spec_of(directory), RunnerConfig(kv_bytes=1 << 21, **config)))


@BOTH
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_on_the_weights_the_codes_stand_for(
    family: str, name: str, quantise: Import, tiny_model: Any, make_harness: Any, oracle_logits: Any
) -> None:
    model = tiny_model(family, vocab_size=259, **FAMILIES[family])
    before = oracle_logits(model, tokens := list(range(3, 60)))
    harness = bound(quantise(model, name), make_harness)
    found, expected = harness.logits(tokens), oracle_logits(model, tokens)
    # Activations keep 15 bits of each group's largest.
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
    assert (before - expected).abs().max() > 2e-2, "quantising changed nothing: a vacuous test"


@BOTH
def test_a_bfloat16_model_stays_within_its_own_rounding(
    name: str, quantise: Import, tiny_model: Any, make_harness: Any, oracle_logits: Any
) -> None:
    model = tiny_model("Llama", vocab_size=259, dtype=torch.bfloat16)
    directory = quantise(exact := copy.deepcopy(model).float(), name)
    assert bound(directory, make_harness).runner.dtype == torch.float32
    config = json.loads((directory / "config.json").read_text())
    assert config["dtype"] == "float32"
    tokens = list(range(3, 60))
    expected = oracle_logits(exact, tokens)
    found = bound(directory, make_harness, dtype=torch.bfloat16).logits(tokens)
    assert (found - expected).norm() / expected.norm() < 0.02


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_call_gives_the_bits_of_single_ops_and_a_batch_those_of_each_alone(
    name: str, dtype: torch.dtype, quantise: Import, tiny_model: Any, make_harness: Any
) -> None:
    directory = quantise(tiny_model("Qwen3", vocab_size=259, attention_bias=True), name)
    fused, single = (bound(directory, make_harness, dtype=dtype) for _ in range(2))
    single.runner.decoder._fused = None
    tokens = [list(range(3, 20)), list(range(50, 90)), [7], list(range(100, 103))]
    alone = [single.logits(each) for each in tokens]
    together = fused.logits_together([fused.sequence(each) for each in tokens])
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(fused.logits(tokens[1], chunk=7), alone[1])


@BOTH
def test_adapters_stand_on_a_quantised_base_as_peft_on_the_weights_it_stands_for(
    name: str, tmp_path: Path, quantise: Import, tiny_model: Any, make_harness: Any
) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_model("Llama", vocab_size=259)
    directory = quantise(model, name)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False))
    peft.save_pretrained(str(tmp_path / "adapter"))
    base = Digest(directory.name)
    digest = import_checkpoint(tmp_path, CheckpointKind.ADAPTER, str(tmp_path / "adapter"), base).digest
    harness, adapter = bound(directory, make_harness), tmp_path / "checkpoints" / digest
    harness.runner.adapters.load(digest, load_directory(adapter, "cpu"))
    with torch.inference_mode():
        expected = peft(torch.tensor([tokens := list(range(3, 40))])).logits[0]
    torch.testing.assert_close(harness.logits(tokens, adapter=digest), expected, atol=5e-3, rtol=0)


def test_matrices_that_do_not_fill_whole_blocks_stay_as_they_are(
    quantise: Import, tiny_model: Any, make_harness: Any, oracle_logits: Any
) -> None:
    model = tiny_model("Llama", vocab_size=259, head_dim=8, num_key_value_heads=1, intermediate_size=100)
    directory = quantise(model, "int4")
    manifest = {entry.name: entry for entry in load_directory(directory, "cpu").manifest.tensors}
    assert manifest["model.layers.0.self_attn.k_proj.weight"].dtype == "F32"
    assert manifest["model.layers.0.mlp.up_proj.weight"].dtype == "F32"
    assert manifest["model.layers.0.mlp.down_proj.weight"].dtype == "U8"
    tokens = list(range(3, 60))
    found = bound(directory, make_harness).logits(tokens)
    torch.testing.assert_close(found, oracle_logits(model, tokens), atol=2e-3, rtol=0)


def test_a_model_that_only_transformers_runs_is_refused_with_the_cure(quantise: Import, tiny_model: Any) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="leave --quantize out"):
        quantise(tiny_model("Cohere", vocab_size=259), "int8")


def test_scales_of_another_shape_are_refused_by_name(quantise: Import, tiny_model: Any, make_harness: Any) -> None:
    directory = quantise(tiny_model("Llama", vocab_size=259), "int8")
    manifest = json.loads((directory / "manifest.json").read_text())
    scale = next(t for t in manifest["tensors"] if t["name"].endswith("layers.1.mlp.up_proj.weight_scale"))
    scale["shape"] = scale["shape"][::-1]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointCorrupt, match=r"layers\.1\.mlp\.up_proj\.weight_scale"):
        bound(directory, make_harness)

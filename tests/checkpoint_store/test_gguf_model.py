"""A GGUF file becomes the checkpoint that transformers makes of it, bit for bit."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nearline.checkpoint_store.gguf_config import gguf_config
from nearline.checkpoint_store.gguf_file import read_gguf
from nearline.checkpoint_store.types import WEIGHTS_NAME
from nearline.protocol.errors import CheckpointCorrupt, NearlineError, UnsupportedCheckpoint
from tests.checkpoint_store.ggufs import write_gguf
from tests.checkpoint_store.sources import import_model, leftovers, published

torch.set_num_threads(1)
KINDS = [GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0")]


def tiny(model_type: str = "llama", **overrides: Any) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(shape | overrides)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_tensors_equal_transformers_dequantisation_in_every_type(
    root: Path, tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    write_gguf(tmp_path / "a.gguf", tiny(), kind=kind)
    manifest = import_model(root, tmp_path / "a.gguf")
    ours = load_file(published(root, manifest) / WEIGHTS_NAME)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "num_key_value_heads": 4}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_the_original_model_comes_back(root: Path, tmp_path: Path, arch: str, overrides: dict[str, Any]) -> None:
    model = tiny(arch, **overrides)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    write_gguf(tmp_path / "a.gguf", model, arch)
    manifest = import_model(root, tmp_path / "a.gguf")
    ours = load_file(published(root, manifest) / WEIGHTS_NAME)
    theirs = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].to(torch.bfloat16)) for name in ours)
    model.save_pretrained(tmp_path / "original")
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=torch.bfloat16)
    reloaded = AutoModelForCausalLM.from_pretrained(published(root, manifest))
    ids = torch.arange(8)[None]
    assert torch.equal(reloaded(ids).logits, original(ids).logits)


def test_a_config_is_what_transformers_reads_from_the_file(root: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", tiny(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}))
    ours = json.loads((published(root, import_model(root, tmp_path / "a.gguf")) / "config.json").read_text())
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="a.gguf").to_dict()
    for name in ("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
                 "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
                 "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id",
                 "attention_bias"):  # fmt: skip
        assert ours[name] == theirs[name] or (name == "architectures" and theirs[name] is None), name


def test_the_stop_tokens_of_a_chat_model_include_end_of_turn(root: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", tiny(), tokenizer__ggml__eot_token_id=257)
    info = import_model(root, tmp_path / "a.gguf").info
    assert set(info.eos_token_ids) == {257, 258}
    assert (info.bos_token_id, info.vocab_size, info.dtype) == (256, 272, "bfloat16")


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_rope_scaling_is_recovered_from_its_divisors(factor: float) -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = tiny(hidden_size=512, head_dim=128, rope_parameters=scaling).config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 5e5 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    metadata = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 131_072,
        "llama.embedding_length": 512, "llama.feed_forward_length": 96, "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 5e5,
    }  # fmt: skip
    assert gguf_config(metadata, 272, False, False, (plain / scaled).tolist())["rope_parameters"] == scaling
    with pytest.raises(UnsupportedCheckpoint, match=r"rope_freqs\.weight is no Llama 3 scaling"):
        gguf_config(metadata, 272, False, False, [3.0] * 64)


def refused(root: Path, path: Path, error: type[NearlineError]) -> str:
    with pytest.raises(error) as caught:
        import_model(root, path)
    assert leftovers(root) == []
    return caught.value.message


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"llama__expert_count": 8}, "mixture-of-experts"),
        ({"split__count": 3}, "llama-gguf-split --merge"),
        ({"llama__logit_scale": 0.25}, "llama.logit_scale is not supported"),
        ({"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 2.0}, "rope scaling 'longrope'"),
        ({"llama__attention__value_length": 8}, "they must be equal"),
    ],
)
def test_a_gguf_of_another_kind_is_refused(root: Path, tmp_path: Path, extra: dict[str, Any], words: str) -> None:
    write_gguf(tmp_path / "a.gguf", tiny(), **extra)
    assert words in refused(root, tmp_path / "a.gguf", UnsupportedCheckpoint)


def test_an_unknown_architecture_is_refused_naming_the_known_ones(root: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", tiny(), arch="gptneox")
    assert "'gptneox' is not supported; supported: llama, qwen2, qwen3" in refused(
        root, tmp_path / "a.gguf", UnsupportedCheckpoint
    )


def test_a_missing_tensor_and_a_tensor_of_zeros_are_named(root: Path, tmp_path: Path) -> None:
    model = tiny()
    torch.nn.init.zeros_(model.model.layers[1].mlp.up_proj.weight)
    write_gguf(tmp_path / "a.gguf", model)
    assert "'blk.1.ffn_up.weight' is all zeros" in refused(root, tmp_path / "a.gguf", CheckpointCorrupt)
    torch.nn.init.normal_(model.model.layers[1].mlp.up_proj.weight)
    del model.model.layers[1].post_attention_layernorm
    write_gguf(tmp_path / "b.gguf", model)
    assert "tensor 'blk.1.ffn_norm.weight' is missing" in refused(root, tmp_path / "b.gguf", CheckpointCorrupt)


def test_values_that_are_not_finite_are_refused_by_name(root: Path, tmp_path: Path) -> None:
    model = tiny()
    model.model.layers[0].mlp.down_proj.weight.data[3, 3] = float("nan")
    write_gguf(tmp_path / "a.gguf", model)
    assert "'blk.0.ffn_down.weight' holds NaN" in refused(root, tmp_path / "a.gguf", CheckpointCorrupt)


@pytest.mark.parametrize("lost", [1, 4096, 0.5, 0.999, 1.0])
def test_a_gguf_cut_short_is_refused_with_sizes(root: Path, tmp_path: Path, lost: float) -> None:
    path = write_gguf(tmp_path / "a.gguf", tiny())
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(int(whole * (1 - lost)) if isinstance(lost, float) else whole - lost)
    message = refused(root, path, CheckpointCorrupt)
    assert str(path) in message
    assert str(path.stat().st_size) in message or path.stat().st_size == 0


def test_metadata_and_offsets_are_those_of_the_gguf_library(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_array("some.strings", ["a", "ü", ""])
    writer.add_array("some.floats", [0.5, -1.0])
    writer.add_int8("some.int8", -3)
    writer.add_uint64("some.uint64", 2**63)
    writer.add_float64("some.float64", 1e-300)
    writer.add_bool("some.bool", True)
    writer.add_tensor("one", np.ones(3, np.float32))
    writer.add_tensor("two", np.ones((5, 7), np.float16))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    theirs = GGUFReader(tmp_path / "a.gguf")
    ours = read_gguf(tmp_path / "a.gguf")
    for field in theirs.fields.values():
        if not field.name.startswith("GGUF."):
            assert ours.metadata[field.name] == field.contents(), field.name
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.offset, mine.num_bytes, mine.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert mine.shape == tuple(int(dim) for dim in reversed(tensor.shape))


@given(st.data())
def test_a_damaged_head_is_refused_and_never_crashes(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    whole = path.with_name("whole.gguf")
    if not whole.exists():
        write_gguf(whole, tiny(num_hidden_layers=1))
    blob = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, 1200))] = data.draw(st.sampled_from([0, 1, 8, 9, 127, 255]))
    path.write_bytes(blob)
    with contextlib.suppress(CheckpointCorrupt, UnsupportedCheckpoint):
        read_gguf(path)


@pytest.mark.slow
def test_smollm2_is_bit_equal_to_transformers_dequantisation(root: Path, smollm2_gguf: Path) -> None:
    manifest = import_model(root, smollm2_gguf)
    ours = load_file(published(root, manifest) / WEIGHTS_NAME)
    theirs = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.bfloat16
    )
    parameters = dict(theirs.named_parameters())
    assert ours.keys() == parameters.keys()
    assert all(torch.equal(ours[name], parameters[name]) for name in ours)


def test_granites_multipliers_come_from_the_metadata(root: Path, tmp_path: Path) -> None:
    scales = {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.25, "attention_multiplier": 0.125, "logits_scaling": 8.0,
    }  # fmt: skip
    model = tiny("granite", tie_word_embeddings=True, **scales)
    metadata = {"embedding_scale": 12.0, "residual_scale": 0.25, "attention__scale": 0.125, "logit_scale": 8.0}
    write_gguf(tmp_path / "a.gguf", model, "granite", **{f"granite__{key}": value for key, value in metadata.items()})
    directory = published(root, import_model(root, tmp_path / "a.gguf"))
    config = json.loads((directory / "config.json").read_text())
    assert {key: config[key] for key in scales} == scales
    model.save_pretrained(tmp_path / "original")
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=torch.bfloat16)
    ours, ids = AutoModelForCausalLM.from_pretrained(directory), torch.arange(8)[None]
    assert torch.equal(ours(ids).logits, original(ids).logits)

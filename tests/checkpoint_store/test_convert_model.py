"""A Hugging Face directory becomes our format: equal bytes, execution order, and a clear answer to every defect."""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from nearline.checkpoint_store.types import WEIGHTS_NAME, read_manifest
from nearline.protocol import decoder_spec, tensor_slots
from nearline.protocol.errors import CheckpointCorrupt, InvalidRequest, NearlineError, UnsupportedCheckpoint
from tests.checkpoint_store.sources import (
    edit_json,
    edit_tensors,
    import_model,
    leftovers,
    names_in_file_order,
    published,
    random_f32,
    read_raw,
    write_raw,
)

torch.set_num_threads(1)
FAMILIES = {
    "LlamaForCausalLM": {}, "MistralForCausalLM": {}, "Qwen2ForCausalLM": {}, "Qwen3ForCausalLM": {"head_dim": 16},
    "SmolLM3ForCausalLM": {"pad_token_id": 0}, "GraniteForCausalLM": {}, "Olmo2ForCausalLM": {},
    "Phi3ForCausalLM": {"pad_token_id": 0}, "GemmaForCausalLM": {"head_dim": 16}, "Gemma2ForCausalLM": {"head_dim": 16},
    "Gemma3_TextForCausalLM": {"head_dim": 16}, "GPT2ForCausalLM": {}, "OPTForCausalLM": {"ffn_dim": 96},
}  # fmt: skip
TIED = ("Qwen3", "SmolLM3", "Gemma", "Gemma3_Text", "GPT2", "OPT")
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def source(tiny_llama_dir: Callable[..., Path]) -> Path:
    """A tiny Llama of this test alone, so that it may be damaged."""
    return tiny_llama_dir()


def refused(root: Path, source: Path, error: type[NearlineError]) -> str:
    """Import what must be refused; nothing may be left of it."""
    with pytest.raises(error) as caught:
        import_model(root, source)
    assert leftovers(root) == []
    return caught.value.message


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_keeps_its_bytes_and_stands_in_execution_order(
    architecture: str, root: Path, tmp_path: Path, tiny_tokenizer_json: dict[str, Any]
) -> None:
    config = AutoConfig.for_model(
        architecture.removesuffix("ForCausalLM").lower(), vocab_size=272, hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=architecture.removesuffix("ForCausalLM") in TIED, **FAMILIES[architecture],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json))
    manifest = import_model(root, tmp_path / "source")
    directory = published(root, manifest)
    ours = load_file(directory / WEIGHTS_NAME)
    theirs = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    slots = tensor_slots(decoder_spec(json.loads((directory / "config.json").read_text())))
    assert names_in_file_order(directory / WEIGHTS_NAME) == [slot.name for slot in slots]
    assert read_manifest(directory) == manifest
    reloaded = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.arange(8)[None]
    assert torch.equal(reloaded(ids).logits, model.eval()(ids).logits)


def test_offsets_of_the_manifest_are_where_the_bytes_are_and_data_starts_on_a_page(root: Path, source: Path) -> None:
    manifest = import_model(root, source)
    blob = (published(root, manifest) / WEIGHTS_NAME).read_bytes()
    raw = read_raw(source / WEIGHTS_NAME)
    for entry in manifest.tensors:
        assert blob[entry.offset : entry.offset + entry.num_bytes] == raw[entry.name][2]
    assert manifest.tensors[0].offset % 4096 == 0
    assert manifest.num_bytes == len(blob) == manifest.tensors[-1].offset + manifest.tensors[-1].num_bytes
    qkv = [entry for entry in manifest.tensors if entry.name.startswith("model.layers.0.self_attn.")][:3]
    assert [entry.name.split(".")[-2] for entry in qkv] == ["q_proj", "k_proj", "v_proj"]
    assert all(a.offset + a.num_bytes == b.offset for a, b in pairwise(qkv))


def test_shards_give_the_same_checkpoint_as_one_file(root: Path, source: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source)
    shutil.copytree(source, tmp_path / "sharded")
    (tmp_path / "sharded" / WEIGHTS_NAME).unlink()
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    manifest = import_model(root, source)
    assert import_model(root, tmp_path / "sharded").digest == manifest.digest
    assert leftovers(root) == [f"checkpoints/{manifest.digest}"]


def test_a_model_of_mixed_dtypes_keeps_each(root: Path, tiny_llama_dir: Callable[..., Path]) -> None:
    source = tiny_llama_dir(dtype="bfloat16")
    edit_tensors(source, **{"model.norm.weight": random_f32((64,))})
    manifest = import_model(root, source)
    dtypes = {entry.name: entry.dtype for entry in manifest.tensors}
    assert (dtypes["model.norm.weight"], dtypes[Q_PROJ]) == ("F32", "BF16")
    assert read_raw(published(root, manifest) / WEIGHTS_NAME)["model.norm.weight"] == random_f32((64,))
    assert (manifest.info.dtype, manifest.info.kv_bytes_per_token) == ("bfloat16", 2 * 2 * 2 * 16 * 2)


def test_what_the_fleet_needs_to_know_is_in_the_info(root: Path, source: Path) -> None:
    edit_json(source / "config.json", eos_token_id=[258, 5, 9999])
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 258, None]}))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    info = import_model(root, source).info
    assert set(info.eos_token_ids) == {258, 5, 7}
    assert info.bos_token_id == 256
    assert (info.vocab_size, info.max_context_tokens, info.dtype) == (272, 512, "float32")
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert "additional_chat_templates/tool_use.jinja" in info.files
    kept = root / "checkpoints" / info.digest / "additional_chat_templates" / "tool_use.jinja"
    assert kept.read_text() == "{{ messages }}"


@pytest.mark.parametrize("eos", [None, {"content": "<|im_end|>"}, "<|im_end|>", "<|unheard|>"])
def test_a_null_eos_is_no_error_and_the_tokenizers_own_counts(root: Path, source: Path, eos: Any) -> None:
    edit_json(source / "config.json", eos_token_id=None, bos_token_id=None)
    (source / "generation_config.json").unlink()
    edit_json(source / "tokenizer_config.json", eos_token=eos)
    known = eos in ("<|im_end|>", {"content": "<|im_end|>"})
    assert import_model(root, source).info.eos_token_ids == ((258,) if known else ())


def test_a_config_without_dtype_means_the_dtype_of_the_weights(root: Path, tiny_llama_dir: Callable[..., Path]) -> None:
    source = tiny_llama_dir(dtype="bfloat16")
    edit_json(source / "config.json", dtype=None)
    manifest = import_model(root, source)
    assert manifest.info.dtype == "bfloat16"
    assert json.loads((published(root, manifest) / "config.json").read_text())["dtype"] == "bfloat16"


# ---- tied and untied heads ----


def test_a_tied_head_stored_twice_is_dropped(root: Path, source: Path) -> None:
    without = import_model(root, source).digest
    edit_tensors(source, **{"lm_head.weight": read_raw(source / WEIGHTS_NAME)["model.embed_tokens.weight"]})
    assert import_model(root, source).digest == without


def test_tied_embeddings_stored_under_the_heads_name_are_accepted(root: Path, source: Path) -> None:
    without = import_model(root, source).digest
    embedding = read_raw(source / WEIGHTS_NAME)["model.embed_tokens.weight"]
    edit_tensors(source, **{"lm_head.weight": embedding, "model.embed_tokens.weight": None})
    assert import_model(root, source).digest == without


def test_a_head_of_its_own_wins_over_a_config_that_says_tied(root: Path, source: Path) -> None:
    edit_tensors(source, **{"lm_head.weight": random_f32((272, 64))})
    manifest = import_model(root, source)
    assert manifest.tensors[-1].name == "lm_head.weight"
    assert json.loads((published(root, manifest) / "config.json").read_text())["tie_word_embeddings"] is False


def test_an_untied_config_without_a_head_is_an_error_that_names_it(root: Path, source: Path) -> None:
    edit_json(source / "config.json", tie_word_embeddings=False)
    assert "'lm_head.weight' is missing (config.json says" in refused(root, source, CheckpointCorrupt)


# ---- what is refused ----


def test_a_missing_tensor_is_named(root: Path, source: Path) -> None:
    edit_tensors(source, **{Q_PROJ: None})
    assert f"tensor {Q_PROJ!r} is missing" in refused(root, source, CheckpointCorrupt)


def test_a_wrong_shape_is_answered_with_both(root: Path, source: Path) -> None:
    edit_tensors(source, **{Q_PROJ: random_f32((64, 32))})
    assert f"{Q_PROJ!r} has shape (64, 32), config.json asks for (64, 64)" in refused(root, source, CheckpointCorrupt)


def test_integer_weights_are_refused(root: Path, source: Path) -> None:
    edit_tensors(source, **{Q_PROJ: ("I8", (64, 64), b"\1" * 4096)})
    assert f"{Q_PROJ!r} is I8; supported: F32, F16, BF16" in refused(root, source, UnsupportedCheckpoint)


@pytest.mark.parametrize("name", [Q_PROJ, "model.norm.weight", "model.embed_tokens.weight"])
def test_a_weight_of_zeros_was_never_written(root: Path, source: Path, name: str) -> None:
    dtype, shape, data = read_raw(source / WEIGHTS_NAME)[name]
    edit_tensors(source, **{name: (dtype, shape, bytes(len(data)))})
    assert f"tensor {name!r} is all zeros ({len(data)} bytes)" in refused(root, source, CheckpointCorrupt)


def test_a_file_that_ends_in_zeros_was_not_written_whole(root: Path, source: Path) -> None:
    tensors = read_raw(source / WEIGHTS_NAME)
    dtype, shape, data = tensors.pop(Q_PROJ)
    write_raw(source / WEIGHTS_NAME, {**tensors, Q_PROJ: (dtype, shape, data[:-5000] + bytes(5000))})
    assert f"ends in 4096 zero bytes inside tensor {Q_PROJ!r}" in refused(root, source, CheckpointCorrupt)


def test_tensors_nobody_uses_are_dropped_with_a_warning(root: Path, source: Path) -> None:
    without = import_model(root, source).digest
    edit_tensors(source, **{"model.layers.0.self_attn.rotary_emb.inv_freq": random_f32((8,))})
    warnings: list[str] = []
    assert import_model(root, source, warnings).digest == without
    assert [w for w in warnings if "model.layers.0.self_attn.rotary_emb.inv_freq" in w]


def test_pickled_weights_are_refused_with_the_cure(root: Path, source: Path) -> None:
    (source / WEIGHTS_NAME).rename(source / "pytorch_model.bin")
    message = refused(root, source, UnsupportedCheckpoint)
    assert "pytorch_model.bin" in message
    assert "save_pretrained(NEW_DIR) writes safetensors" in message


def test_a_model_without_a_fast_tokenizer_is_refused_with_the_cure(root: Path, source: Path) -> None:
    (source / "tokenizer.json").rename(source / "tokenizer.model")
    message = refused(root, source, UnsupportedCheckpoint)
    assert "no tokenizer.json, only tokenizer.model; AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPTBigCodeForCausalLM"]}, "architecture 'GPTBigCodeForCausalLM' is not supported"),
        ({"architectures": None}, "architecture '(none)'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "pre-quantised weights (gptq)"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "big"}, "a value we cannot use"),
        ({"num_attention_heads": 0, "head_dim": None}, "a value we cannot use"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
    ],
)
def test_a_config_we_cannot_run_is_refused(root: Path, source: Path, changes: dict[str, Any], words: str) -> None:
    edit_json(source / "config.json", **changes)
    assert words in refused(root, source, UnsupportedCheckpoint)


def test_a_config_of_absurd_depth_is_refused_at_once(root: Path, source: Path) -> None:
    edit_json(source / "config.json", num_hidden_layers=10**9)
    assert "cannot make 1000000000 layers" in refused(root, source, CheckpointCorrupt)


def test_a_directory_without_config_or_with_an_adapter_is_no_model(root: Path, source: Path) -> None:
    (source / "config.json").unlink()
    assert "no config.json" in refused(root, source, UnsupportedCheckpoint)
    (source / "adapter_config.json").write_text("{}")
    assert "is a LoRA adapter, not a model" in refused(root, source, UnsupportedCheckpoint)


def test_weights_that_are_a_link_out_of_the_directory_are_refused(root: Path, source: Path, tmp_path: Path) -> None:
    (source / WEIGHTS_NAME).rename(tmp_path / "elsewhere.safetensors")
    (source / WEIGHTS_NAME).symlink_to(tmp_path / "elsewhere.safetensors")
    assert "leads outside" in refused(root, source, InvalidRequest)


def test_a_custom_code_config_runs_no_code(root: Path, source: Path) -> None:
    edit_json(source / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"}, model_file="evil.py")
    (source / "evil.py").write_text("raise SystemExit('executed')")
    manifest = import_model(root, source)
    assert "evil.py" not in manifest.info.files


def test_a_gpt2_saved_without_its_output_layer_is_the_same_model(
    root: Path, tmp_path: Path, tiny_tokenizer_json: dict[str, Any]
) -> None:
    """The original GPT-2 is such a file: names without `transformer.`, attention masks among the weights."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=259)
    )
    model.save_pretrained(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "bare")
    tensors = read_raw(tmp_path / "whole" / WEIGHTS_NAME)
    bare = {name.removeprefix("transformer."): raw for name, raw in tensors.items()}
    write_raw(tmp_path / "bare" / WEIGHTS_NAME, {**bare, "h.0.attn.bias": random_f32((1, 1, 4, 4))})
    for name in ("whole", "bare"):
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json))
    warnings: list[str] = []
    digest = import_model(root, tmp_path / "bare", warnings).digest
    assert digest == import_model(root, tmp_path / "whole").digest
    assert "transformer.h.0.attn.bias" in warnings[0]


def generic_source(path: Path, tokenizer: dict[str, Any], model_type: str, **overrides: Any) -> Any:
    shape = {"vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 11}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128}
    config = AutoConfig.for_model(model_type, **(shape | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return model


@pytest.mark.parametrize("model_type", ["cohere", "stablelm", "gpt_neox"])
def test_a_model_that_is_not_described_keeps_its_own_tensors_layer_by_layer(
    model_type: str, root: Path, tmp_path: Path, tiny_tokenizer_json: dict[str, Any]
) -> None:
    model = generic_source(tmp_path / "source", tiny_tokenizer_json, model_type)
    manifest = import_model(root, tmp_path / "source")
    assert (manifest.info.family, manifest.info.dtype) == ("generic", "bfloat16")
    assert manifest.info.kv_bytes_per_token == 2 * 11 * 64 * 2
    names = names_in_file_order(published(root, manifest) / WEIGHTS_NAME)
    assert "embed" in names[0]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    reloaded, ids = AutoModelForCausalLM.from_pretrained(published(root, manifest)), torch.arange(8)[None]
    assert torch.equal(reloaded(ids).logits, model.eval()(ids).logits)


def test_an_undescribed_model_without_its_output_layer_is_refused(
    root: Path, tmp_path: Path, tiny_tokenizer_json: dict[str, Any]
) -> None:
    generic_source(tmp_path / "source", tiny_tokenizer_json, "stablelm", num_hidden_layers=1)
    edit_json(tmp_path / "source" / "config.json", tie_word_embeddings=False)
    edit_tensors(tmp_path / "source", **{"lm_head.weight": None})
    assert "no output layer" in refused(root, tmp_path / "source", CheckpointCorrupt)

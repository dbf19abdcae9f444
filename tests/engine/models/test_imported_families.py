"""The new families all the way: saved in shards, imported, loaded, run; and adapters that peft trained on them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.engine.runner import Runner, RunnerConfig
from nearline.loader import load_directory
from nearline.protocol import CheckpointKind, Digest, decoder_spec
from tests.engine.engine_process import EngineUnderTest
from tests.engine.fake_engine import make_request

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {},
    "Qwen3": {},
    "SmolLM3": {"no_rope_layer_interval": 2},
    "Gemma": {},
    "Granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.125},
    "Olmo2": {},
    "Phi3": {},
    "Gemma2": {"sliding_window": 8},
    "Gemma3": {"sliding_window": 8, "tie_word_embeddings": False},
    "GPT2": {},
    "OPT": {"ffn_dim": 112},
    "Cohere": {"tie_word_embeddings": True},
    "Starcoder2": {"tie_word_embeddings": False, "sliding_window": 8},
}


def bind_directory(directory: Path, make_harness: Any) -> Any:
    weights = load_directory(directory, "cpu")
    spec = decoder_spec(json.loads((directory / "config.json").read_text()))
    return make_harness(weights, Runner(weights, spec, RunnerConfig(kv_bytes=1 << 21)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_checkpoint_gives_transformers_logits(
    family: str, tmp_path: Path, tiny_model: Any, tiny_tokenizer_json: Any, make_harness: Any, oracle_logits: Any
) -> None:
    model = tiny_model(family, vocab_size=259, **FAMILIES[family])
    model.save_pretrained(tmp_path / "source", max_shard_size="60KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    (tmp_path / "source" / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json))
    digest = import_checkpoint(tmp_path, CheckpointKind.MODEL, str(tmp_path / "source")).digest
    harness, tokens = bind_directory(tmp_path / "checkpoints" / digest, make_harness), list(range(3, 60))
    torch.testing.assert_close(harness.logits(tokens), oracle_logits(model, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["Granite", "Olmo2", "Gemma3"])
def test_an_adapter_equals_peft(
    family: str, tmp_path: Path, tiny_model: Callable[..., Any], tiny_tokenizer_json: Any, make_harness: Any
) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_model(family, vocab_size=259, **FAMILIES[family])
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json))
    base = import_checkpoint(tmp_path, CheckpointKind.MODEL, str(tmp_path / "base")).digest
    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    peft = get_peft_model(model, config)
    peft.save_pretrained(tmp_path / "adapter")
    digest = import_checkpoint(tmp_path, CheckpointKind.ADAPTER, str(tmp_path / "adapter"), base).digest
    harness, tokens = bind_directory(tmp_path / "checkpoints" / base, make_harness), list(range(3, 40))
    directory = tmp_path / "checkpoints" / digest
    harness.runner.adapters.load(Digest(digest), load_directory(directory, "cpu"))
    plain = harness.logits(tokens)
    with torch.inference_mode():
        expected = peft(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(harness.logits(tokens, adapter=digest), expected, atol=1e-4, rtol=0)
    assert (plain - expected).abs().max() > 0.1, "the adapter changes nothing: a vacuous test"


@pytest.mark.slow
def test_one_engine_process_serves_family_after_family(
    tmp_path: Path, tiny_model: Any, tiny_tokenizer_json: Any, oracle_greedy: Any
) -> None:
    engine = EngineUnderTest()
    try:
        for family in ("Gemma2", "Cohere", "GPT2"):
            model, source = tiny_model(family, vocab_size=259, **FAMILIES[family]), tmp_path / family
            model.save_pretrained(source)
            (source / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json))
            digest = import_checkpoint(tmp_path, CheckpointKind.MODEL, str(source)).digest
            engine.inbox.clear()
            engine.bind(tmp_path / "checkpoints" / digest, kv_bytes=4 << 20)
            prompts = [list(range(3, 40)), [5, 6, 7]]
            requests = [make_request(f"r{i}", p, max_tokens=6, ignore_eos=True) for i, p in enumerate(prompts)]
            assert engine.generate(*requests) == [oracle_greedy(model, tokens, 6) for tokens in prompts]
            engine.unbind()
    finally:
        assert "Traceback" not in engine.close()

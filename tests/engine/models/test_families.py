"""Families that differ from Llama in more than a switch, against transformers, on tiny random weights."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)],
}  # fmt: skip
LONG = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 2048, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("Granite", {
        "embedding_multiplier": 12.0, "attention_multiplier": 0.125, "residual_multiplier": 0.22, "logits_scaling": 6.0,
    }),
    "granite tied with biases": (
        "Granite", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "embedding_multiplier": 3.3}
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2 tied": ("Olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    "phi3": ("Phi3", {}),
    "phi3 with a window": ("Phi3", {"sliding_window": 24, "tie_word_embeddings": True}),
    "phi3 with half its head turned": ("Phi3", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}),
    "phi3 with longrope": ("Phi3", LONG),
    "gemma": ("Gemma", {"head_dim": 24}),
    "gemma untied": ("Gemma", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2": ("Gemma2", {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 24}),
    "gemma2 with small caps": (
        "Gemma2", {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "sliding_window": 16}
    ),
    "gemma3": ("Gemma3", {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 24, "num_hidden_layers": 7}),
    "gemma3 with rope scaling": ("Gemma3", {
        "sliding_window": 32, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": False, "final_logit_softcapping": 3.0, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0}}}),
    "gpt2": ("GPT2", {}),
    "gpt2 untied": ("GPT2", {"tie_word_embeddings": False, "n_inner": 96, "activation_function": "relu"}),
    "opt": ("OPT", {"ffn_dim": 112}),
    "opt without biases": ("OPT", {"ffn_dim": 96, "enable_bias": False, "activation_function": "gelu"}),
}  # fmt: skip
ONE_OF_EACH = ["granite", "olmo2", "phi3", "gemma", "gemma2", "gemma3", "gpt2", "opt"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_position_equal_transformers(
    family: str, tiny_model: Callable[..., Any], bind: Any, oracle_logits: Any, prompt: Any
) -> None:
    name, overrides = FAMILIES[family]
    model, tokens = tiny_model(name, **overrides), prompt(70)
    ours, theirs = bind(model).logits(tokens), oracle_logits(model, tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert theirs.std() > 0.05, "logits too small for the tolerance to mean anything"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_bfloat16_stay_near_those_of_float32(
    family: str, tiny_model: Callable[..., Any], bind: Any, oracle_logits: Any, prompt: Any
) -> None:
    """Bound: our error against float32 is at most 1.25 times transformers' own (root mean square)."""
    name, overrides = FAMILIES[family]
    model, tokens = tiny_model(name, dtype=torch.bfloat16, **overrides), prompt(70)
    harness = bind(model)
    assert harness.runner.dtype == torch.bfloat16
    ours, theirs = harness.logits(tokens), oracle_logits(model, tokens)
    exact = oracle_logits(model.float(), tokens)
    error, allowed = (ours - exact).square().mean().sqrt(), (theirs - exact).square().mean().sqrt()
    assert error <= 1.25 * allowed, f"{error} against {allowed}"


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_greedy_tokens_equal_transformers_in_a_chunked_batch(
    family: str, tiny_model: Callable[..., Any], bind: Any, oracle_greedy: Any, prompt: Any
) -> None:
    name, overrides = FAMILIES[family]
    model = tiny_model(name, **overrides)
    harness, prompts = bind(model), [prompt(length, seed=length) for length in (3, 32, 50)]
    expected = [oracle_greedy(model, tokens, 6) for tokens in prompts]
    assert harness.generate([harness.sequence(tokens) for tokens in prompts], 6, chunk=7) == expected


def test_longrope_serves_the_context_in_which_its_short_factors_hold(tiny_model: Any, bind: Any) -> None:
    spec = bind(tiny_model("Phi3", **LONG)).runner.spec
    assert spec.max_context_tokens == 2048
    assert spec.rope_scaling is not None
    assert spec.rope_scaling.value("attention_factor", 0.0) == pytest.approx(
        math.sqrt(1 + math.log(2) / math.log(2048))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_compiled_call_gives_the_bits_of_the_single_ops(
    family: str, dtype: torch.dtype, tiny_model: Callable[..., Any], bind: Any, prompt: Any
) -> None:
    name, overrides = FAMILIES[family]
    harness, tokens = bind(tiny_model(name, dtype=dtype, **overrides)), prompt(50)
    assert harness.runner.decoder._fused is not None
    compiled = harness.logits(tokens, chunk=30)
    harness.runner.decoder._fused = None
    torch.testing.assert_close(harness.logits(tokens, chunk=30), compiled, atol=0, rtol=0)


def test_transposed_weights_stay_views(tiny_model: Callable[..., Any], bind: Any, prompt: Any) -> None:
    harness = bind(tiny_model("GPT2"))
    harness.logits(prompt(3))
    stored = harness.weights.tensors["transformer.h.1.mlp.c_fc.weight"]
    assert harness.runner.decoder.layers[1].gate_up_NM.data_ptr() == stored.data_ptr()

"""What every family owes: heads tied or not, float32 norms among bfloat16 weights, position 2,000 in 16 bits, and the
proportions of real models, scaled down."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {"sliding_window": 24}, "Qwen2": {}, "Qwen3": {}, "SmolLM3": {"no_rope_layer_interval": 2},
    "Granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.125},
    "Olmo2": {}, "Phi3": {}, "Gemma": {}, "Gemma2": {"sliding_window": 16},
    "Gemma3": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "GPT2": {}, "OPT": {"ffn_dim": 112},
}  # fmt: skip

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
REAL: dict[str, tuple[str, tuple[int, int, int, int, int], dict[str, Any]]] = {
    "Llama 2 7B": ("Llama", (4096, 32, 32, 128, 11008), {"max_position_embeddings": 4096}),
    "Llama 3.2 3B": ("Llama", (3072, 24, 8, 128, 8192), {
        "tie_word_embeddings": True, "max_position_embeddings": 131072,
        "rope_parameters": LLAMA3 | {"rope_theta": 500_000.0, "factor": 32.0}}),
    "Llama 3.1 405B": ("Llama", (16384, 128, 8, 128, 53248), {
        "max_position_embeddings": 131072, "rope_parameters": LLAMA3 | {"rope_theta": 500_000.0, "factor": 8.0}}),
    "Yi 34B": ("Llama", (7168, 56, 8, 128, 20480), {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}),
    "SmolLM2 135M": ("Llama", (576, 9, 3, 64, 1536), {
        "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}}),
    "Mistral 7B 0.1": ("Mistral", (4096, 32, 8, 128, 14336), {"sliding_window": 4096 // 128}),
    "Mistral Nemo": ("Mistral", (5120, 32, 8, 128, 14336), {
        "sliding_window": None, "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "Qwen 2.5 7B": ("Qwen2", (3584, 28, 4, 128, 18944), {
        "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28, "rms_norm_eps": 1e-6}),
    "Qwen 2 1.5B": ("Qwen2", (1536, 12, 2, 128, 8960), {"tie_word_embeddings": True}),
    "Qwen 3 4B": ("Qwen3", (2560, 32, 8, 128, 9728), {"tie_word_embeddings": True, "max_position_embeddings": 40960}),
    "Phi 4": ("Phi3", (5120, 40, 10, 128, 17920), {
        "rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0, "partial_rotary_factor": 1.0}}),
    "Gemma 2 9B": ("Gemma2", (3584, 16, 8, 256, 14336), {"query_pre_attn_scalar": 256, "sliding_window": 32}),
    "Gemma 3 1B": ("Gemma3", (1152, 4, 1, 256, 6912), {"query_pre_attn_scalar": 256, "sliding_window": 32}),
    "Granite 3.1 8B": ("Granite", (4096, 32, 8, 128, 12800), {
        "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22,
        "logits_scaling": 16.0, "tie_word_embeddings": True}),
    "OLMo 2 7B": ("Olmo2", (4096, 32, 32, 128, 11008), {}),
    "GPT-2": ("GPT2", (768, 12, 12, 64, 3072), {}),
    "OPT 1.3B": ("OPT", (2048, 32, 32, 64, 8192), {}),
}  # fmt: skip
"""Model → its architecture, its (M, H, K, D, F), and what else its config says."""


def logits_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).square().mean().sqrt())


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_heads_tied_or_not_give_transformers_logits(
    family: str, is_tied: bool, tiny_model: Callable[..., Any], bind: Any, oracle_logits: Any, prompt: Any
) -> None:
    switches = ARCHITECTURES[family] | {"num_hidden_layers": 2, "tie_word_embeddings": is_tied}
    model, tokens = tiny_model(family, **switches), prompt(40)
    harness = bind(model)
    assert harness.runner.spec.is_tied is is_tied
    torch.testing.assert_close(harness.logits(tokens), oracle_logits(model, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_norms_in_float32_within_a_bfloat16_checkpoint_change_nothing(
    family: str, tiny_model: Callable[..., Any], bind: Any, prompt: Any
) -> None:
    model, tokens = tiny_model(family, dtype=torch.bfloat16, **ARCHITECTURES[family], num_hidden_layers=2), prompt(20)
    expected = bind(model).logits(tokens)
    norms = [(n, p) for n, p in model.named_parameters() if "norm" in n or ".ln_" in n]
    assert len(norms) >= 5
    for _, parameter in norms:
        parameter.data = parameter.data.float()
    harness = bind(model)
    assert harness.runner.dtype == torch.bfloat16
    torch.testing.assert_close(harness.logits(tokens), expected, atol=0, rtol=0)


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Gemma2", "GPT2"])
def test_bfloat16_at_position_2000_stays_as_near_to_float32_as_transformers(
    family: str, tiny_model: Callable[..., Any], bind: Any, oracle_logits: Any, prompt: Any
) -> None:
    """Bound: our error against float32 is at most 1.25 times transformers' own (root mean square)."""
    switches = ARCHITECTURES[family] | {"num_hidden_layers": 2}
    model, tokens = tiny_model(family, dtype=torch.bfloat16, **switches), prompt(2010)
    ours, theirs = bind(model).logits(tokens, chunk=512)[-16:], oracle_logits(model, tokens)[-16:]
    exact = oracle_logits(model.float(), tokens)[-16:]
    assert logits_error(ours, exact) <= 1.25 * logits_error(theirs, exact)


@pytest.mark.parametrize("name", REAL)
def test_the_proportions_of_real_models_scaled_down(
    name: str, tiny_model: Callable[..., Any], bind: Any, oracle_logits: Any, prompt: Any
) -> None:
    """An eighth or a sixteenth of every width, all heads of them: groups, odd head dims and wide halves stay."""
    family, (dim, heads, kv_heads, head_dim, ffn_dim), extras = REAL[name]
    part = 16 if head_dim >= 128 else 8
    shape = {
        "hidden_size": dim // part, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim // part, "intermediate_size": ffn_dim // part, "ffn_dim": ffn_dim // part,
    }  # fmt: skip
    model, tokens = tiny_model(family, num_hidden_layers=2, **shape, **extras), prompt(40)
    harness = bind(model)
    spec = harness.runner.spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (heads, kv_heads, head_dim // part)
    ours, theirs = harness.logits(tokens, chunk=33), oracle_logits(model, tokens)
    torch.testing.assert_close(ours / theirs.std(), theirs / theirs.std(), atol=1e-4, rtol=0)

"""The decoder against transformers, family by family, on tiny random weights in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nearline.kernels import FusedDecoder
from tests.engine.conftest import SMALLER, StateDictWeights

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama untied": ("Llama", {"tie_word_embeddings": False}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without grouped heads": ("Llama", {"num_key_value_heads": 4}),
    "llama with gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama with relu": ("Llama", {"hidden_act": "relu"}),
    "mistral with a window": ("Mistral", {"sliding_window": 24}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with windows on some layers": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "smollm3 with windows": (
        "SmolLM3", {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 16}
    ),
}  # fmt: skip

ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn with mscale": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "mscale": 1.0,
        "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
    "yarn with attention_factor": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "attention_factor": 1.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_position_equal_transformers(
    family: str, tiny_model: Callable[..., Any], bind: Any, oracle_logits: Any, prompt: Any
) -> None:
    name, overrides = FAMILIES[family]
    model = tiny_model(name, **overrides)
    tokens = prompt(70)
    torch.testing.assert_close(bind(model).logits(tokens), oracle_logits(model, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ROPE_SCALINGS)
def test_rope_scaling_equals_transformers_at_position_2000(
    kind: str, tiny_model: Callable[..., Any], bind: Any, oracle_logits: Any, prompt: Any
) -> None:
    scaling = {"rope_theta": 10_000.0} | ROPE_SCALINGS[kind]
    model = tiny_model("Llama", **SMALLER, rope_parameters=scaling)
    tokens = prompt(2050)
    ours, theirs = bind(model).logits(tokens), oracle_logits(model, tokens)
    torch.testing.assert_close(ours[-64:], theirs[-64:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_sixteen_bits_stay_near_those_of_float32(
    family: str, dtype: torch.dtype, tiny_model: Callable[..., Any], bind: Any, oracle_logits: Any, prompt: Any
) -> None:
    """Bound: our error against float32 is at most 1.25 times transformers' own in that dtype (root mean square)."""
    name, overrides = FAMILIES[family]
    model, tokens = tiny_model(name, dtype=dtype, **overrides), prompt(70)
    harness = bind(model)
    assert harness.runner.dtype == dtype
    ours, theirs = harness.logits(tokens), oracle_logits(model, tokens)
    exact = oracle_logits(model.float(), tokens)
    error, allowed = (ours - exact).square().mean().sqrt(), (theirs - exact).square().mean().sqrt()
    assert error <= 1.25 * allowed, f"{error} against {allowed}"


@pytest.mark.parametrize("chunk", [1, 5, 16, 33])
@pytest.mark.parametrize("family", ["llama tied", "mistral with a window", "smollm3"])
def test_chunked_prefill_equals_unchunked(
    family: str, chunk: int, tiny_model: Callable[..., Any], bind: Any, prompt: Any
) -> None:
    name, overrides = FAMILIES[family]
    harness = bind(tiny_model(name, **overrides))
    tokens = prompt(61)
    torch.testing.assert_close(harness.logits(tokens, chunk), harness.logits(tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama untied", "mistral with a window", "qwen2", "qwen3", "smollm3"])
def test_greedy_tokens_equal_transformers_alone_and_in_a_batch(
    family: str, tiny_model: Callable[..., Any], bind: Any, oracle_greedy: Any, prompt: Any
) -> None:
    name, overrides = FAMILIES[family]
    model = tiny_model(name, **overrides)
    harness = bind(model)
    prompts = [prompt(length, seed=length) for length in (3, 17, 32, 50, 64)]
    expected = [oracle_greedy(model, tokens, 12) for tokens in prompts]
    assert [harness.generate([harness.sequence(tokens)], 12)[0] for tokens in prompts] == expected
    assert harness.generate([harness.sequence(tokens) for tokens in prompts], 12) == expected
    assert harness.generate([harness.sequence(tokens) for tokens in prompts], 12, chunk=7) == expected


@pytest.mark.parametrize("family", ["llama with biases", "mistral with a window", "qwen2", "qwen3", "smollm3"])
def test_layers_op_by_op_equal_the_compiled_call(
    family: str, tiny_model: Callable[..., Any], bind: Any, prompt: Any
) -> None:
    name, overrides = FAMILIES[family]
    harness, tokens = bind(tiny_model(name, **overrides)), prompt(50)
    compiled = harness.logits(tokens, chunk=30)
    harness.runner.decoder._fused = None
    torch.testing.assert_close(harness.logits(tokens, chunk=30), compiled, atol=1e-5, rtol=0)


def test_mixed_dtypes_compute_in_the_dtype_of_the_projections(
    tiny_model: Callable[..., Any], bind: Any, oracle_logits: Any, prompt: Any
) -> None:
    model, tokens = tiny_model("Llama", dtype=torch.bfloat16), prompt(20)
    expected = bind(model).logits(tokens)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    harness = bind(model)
    assert harness.runner.dtype == torch.bfloat16
    torch.testing.assert_close(harness.logits(tokens), expected, atol=0, rtol=0)


@pytest.mark.parametrize(("is_complete", "num_calls"), [(True, 1), (False, 3)])
def test_layers_run_in_one_call_once_every_byte_is_there_and_one_by_one_before(
    is_complete: bool, num_calls: int, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Any], bind: Any,
    oracle_logits: Any, prompt: Any,
) -> None:  # fmt: skip
    monkeypatch.setattr(StateDictWeights, "is_complete", lambda _: is_complete)
    calls, run = [], FusedDecoder.run

    def counted(self: FusedDecoder, *arguments: Any) -> None:
        calls.append(arguments)
        run(self, *arguments)

    monkeypatch.setattr(FusedDecoder, "run", counted)
    model = tiny_model("Llama", num_hidden_layers=3)
    bound, tokens = bind(model), prompt(20)
    calls.clear()
    torch.testing.assert_close(bound.logits(tokens), oracle_logits(model, tokens), atol=1e-4, rtol=0)
    assert len(calls) == num_calls

"""Decoders that no spec describes run through transformers' modules: its logits, our cache, chunks and batches."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nearline.engine.runner import Runner, RunnerConfig
from nearline.protocol import GENERIC, DecoderSpec
from nearline.protocol.errors import CheckpointCorrupt, UnsupportedCheckpoint

WITHOUT_GROUPS = {"GPTNeoX", "Persimmon"}
SMALL_WINDOW = {"Cohere2", "Olmo3", "Exaone4", "Starcoder2", "VaultGemma"}
FAMILIES = [architecture.removesuffix("ForCausalLM") for architecture in GENERIC]


@pytest.fixture
def make(tiny_model: Callable[..., Any], bind: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Make a tiny model, and a harness that runs it."""

    def build(family: str, **overrides: Any) -> tuple[Any, Any]:
        window = {"sliding_window": 24} if family in SMALL_WINDOW else {}
        heads = {"num_key_value_heads": 4} if family in WITHOUT_GROUPS else {}
        model = tiny_model(family, **(window | heads | overrides))
        return model, bind(model)

    return build


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_position_equal_transformers(
    family: str, make: Callable[..., Any], oracle_logits: Any, prompt: Any
) -> None:
    (model, harness), tokens = make(family), prompt(70)
    ours, theirs = harness.logits(tokens, chunk=33), oracle_logits(model, tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert model.config._attn_implementation == "eager", "the oracle uses its own attention"


@pytest.mark.parametrize("family", ["Cohere", "StableLm", "Starcoder2"])
def test_greedy_tokens_equal_transformers_in_a_chunked_batch(
    family: str, make: Callable[..., Any], oracle_greedy: Any, prompt: Any
) -> None:
    (model, harness), prompts = make(family), [prompt(length, seed=length) for length in (3, 32, 50)]
    expected = [oracle_greedy(model, tokens, 6) for tokens in prompts]
    assert harness.generate([harness.sequence(tokens) for tokens in prompts], 6, chunk=7) == expected


@pytest.mark.parametrize("family", ["Cohere", "Starcoder2"])
def test_a_long_context_in_bfloat16_stays_as_near_to_float32_as_transformers(
    family: str, make: Callable[..., Any], oracle_logits: Any, prompt: Any
) -> None:
    """Bound: our error against float32 is at most 1.25 times transformers' own (root mean square), at position 2000."""
    (model, harness), tokens = make(family, dtype=torch.bfloat16, num_hidden_layers=2), prompt(2010)
    assert harness.runner.dtype == torch.bfloat16
    ours, theirs = harness.logits(tokens, chunk=512)[-16:], oracle_logits(model, tokens)[-16:]
    exact = oracle_logits(model.float(), tokens)[-16:]
    error, allowed = (ours - exact).square().mean().sqrt(), (theirs - exact).square().mean().sqrt()
    assert error <= 1.25 * allowed, f"{error} against {allowed}"


def test_weights_stay_views(make: Callable[..., Any], prompt: Any) -> None:
    _, harness = make("Cohere")
    harness.logits(prompt(3))
    module = harness.runner.decoder._model.model.layers[1].mlp.down_proj.weight
    assert module.data_ptr() == harness.weights.tensors["model.layers.1.mlp.down_proj.weight"].data_ptr()


@pytest.mark.parametrize("damage", ["missing", "misshapen"])
def test_tensors_are_checked_when_the_model_is_bound(damage: str, make: Callable[..., Any]) -> None:
    _, harness = make("StableLm")
    spec: DecoderSpec = harness.runner.spec
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = harness.weights.tensors.pop(name)
    if damage == "misshapen":
        harness.weights.tensors[name] = tensor[1:]
    with pytest.raises(CheckpointCorrupt, match=r"layers\.1\.mlp\.down_proj"):
        Runner(harness.weights, spec, RunnerConfig(kv_bytes=1 << 20))


def test_without_transformers_the_cure_is_named(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, harness = make("StableLm")
    monkeypatch.setitem(sys.modules, "nearline.engine.models.generic", None)
    with pytest.raises(UnsupportedCheckpoint, match=r"install nearline\[generic\]"):
        Runner(harness.weights, harness.runner.spec, RunnerConfig(kv_bytes=1 << 20))

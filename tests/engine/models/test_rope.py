"""Rotary frequencies against transformers' own, and the table that grows."""

from typing import Any

import pytest
import torch

from nearline.engine.models.rope import INITIAL_POSITIONS, RopeTable, inverse_frequencies
from nearline.protocol import DecoderSpec, decoder_spec

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 24, "beta_slow": 3},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9, "truncate": False},
]  # fmt: skip


def spec_of(scaling: dict[str, Any], **overrides: Any) -> tuple[DecoderSpec, Any]:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1, intermediate_size=64,
        vocab_size=32, max_position_embeddings=131072, rope_parameters={"rope_theta": 500_000.0} | scaling, **overrides,
    )  # fmt: skip
    return decoder_spec(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}), config


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(f"{v}" for v in s.values()))
def test_frequencies_equal_transformers(scaling: dict[str, Any]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    spec, config = spec_of(scaling)
    rotary = LlamaRotaryEmbedding(config)
    frequencies, factor = inverse_frequencies(spec)
    assert factor == pytest.approx(rotary.attention_scaling, rel=1e-12)
    torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=2e-7, atol=0)


def test_the_table_grows_and_keeps_its_values() -> None:
    spec, _ = spec_of({"rope_type": "default"})
    table = RopeTable(spec, torch.device("cpu"))
    first = table.table_SD
    assert first.shape == (INITIAL_POSITIONS, spec.head_dim)
    table.reserve(INITIAL_POSITIONS)
    assert table.table_SD is first
    table.reserve(INITIAL_POSITIONS + 1)
    assert table.table_SD.shape[0] >= INITIAL_POSITIONS + 1
    assert torch.equal(table.table_SD[:INITIAL_POSITIONS], first)

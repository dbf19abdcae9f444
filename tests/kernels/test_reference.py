"""The specification against outside oracles: transformers' Llama pieces and torch's own attention."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from nearline.kernels import reference
from tests.kernels.paged import DTYPES, assert_rounded_from, naive_attention, paged_problem


def test_rms_norm_is_transformers_llama_norm() -> None:
    norm = LlamaRMSNorm(48, eps=1e-5)
    norm.weight.data.normal_()
    x = torch.randn(7, 48)
    torch.testing.assert_close(reference.rms_norm(x, norm.weight, 1e-5), norm(x))


def test_rope_is_transformers_half_rotation() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=64)
    positions = torch.tensor([0, 1, 63, 17])
    q, k = torch.randn(4, 4, 16), torch.randn(4, 2, 16)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected = apply_rotary_pos_emb(q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin)
    frequencies = torch.arange(64)[:, None] / 10_000 ** (torch.arange(0, 16, 2) / 16)
    reference.rope_(q, k, positions, torch.cat([frequencies.cos(), frequencies.sin()], -1))
    for ours, theirs in zip((q, k), expected, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_attention_is_torch_causal_attention() -> None:
    p = paged_problem([(33, 33)], heads=(6, 2, 16))
    k, v = (x.transpose(0, 1)[None] for x in p.dense[0])
    p.meta.block_tables_BN.clamp_(min=0)
    q = p.q_THD.transpose(0, 1)[None]
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
    result = reference.paged_attention(p.q_THD, p.k_cache, p.v_cache, p.meta, 0.25)
    torch.testing.assert_close(result, expected[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 6])
def test_attention_of_mixed_prefill_and_decode_equals_dense_softmax(window: int | None, dtype: torch.dtype) -> None:
    p = paged_problem([(1, 19), (7, 7), (3, 40), (0, 3)], dtype=dtype)
    result = reference.paged_attention(p.q_THD, p.k_cache, p.v_cache, p.meta, 0.3, window)
    assert_rounded_from(result, naive_attention(p, 0.3, window))


def test_a_gated_silu_is_llamas_gate() -> None:
    x = torch.randn(3, 20)
    torch.testing.assert_close(reference.activate(x, "silu"), F.silu(x[:, :10]) * x[:, 10:])

"""A fused run of layers gives the bits of the single ops, with and without adapters."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from nearline import kernels
from nearline.kernels import (
    AttentionMeta,
    FusedDecoder,
    FusedStep,
    LayerShape,
    LayerTensors,
    LoraSegment,
    PackedAdapter,
)
from tests.kernels.paged import DTYPES

pytestmark = pytest.mark.usefixtures("compiled")

SHAPE = LayerShape(num_heads=6, num_kv_heads=2, head_dim=16, model_dim=72, ffn_dim=101, norm_eps=1e-5, scale=0.25)
NUM_LAYERS, BLOCK_SIZE = 3, 16
WINDOWS = (None, 8, None)
HAS_ROPE = (True, True, False)
Q, KV = SHAPE.num_heads * SHAPE.head_dim, SHAPE.num_kv_heads * SHAPE.head_dim
M, F = SHAPE.model_dim, SHAPE.ffn_dim
Pairs = dict[str, tuple[Tensor, Tensor, Tensor | None, Tensor | None]]
Caches = list[tuple[Tensor, Tensor]]


def _weights(dtype: torch.dtype, norm_dtype: torch.dtype, has_extras: bool) -> LayerTensors:
    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns) * columns**-0.5).to(dtype)

    def norm(dim: int) -> Tensor:
        return torch.randn(dim).to(norm_dtype)

    return LayerTensors(
        input_norm_M=norm(M),
        qkv_NM=matrix(Q + 2 * KV, M),
        qkv_bias_N=torch.randn(Q + 2 * KV).to(dtype) if has_extras else None,
        q_norm_D=norm(SHAPE.head_dim) if has_extras else None,
        k_norm_D=norm(SHAPE.head_dim) if has_extras else None,
        o_MN=matrix(M, Q),
        o_bias_M=torch.randn(M).to(dtype) if has_extras else None,
        mlp_norm_M=norm(M),
        gate_up_NM=matrix(2 * F, M),
        gate_up_bias_N=torch.randn(2 * F).to(dtype) if has_extras else None,
        down_MF=matrix(M, F),
        down_bias_M=torch.randn(M).to(dtype) if has_extras else None,
    )


def _adapter(dtype: torch.dtype, rank: int) -> list[Pairs]:
    sizes = {"q_proj": (Q, M), "v_proj": (KV, M), "o_proj": (M, Q), "up_proj": (F, M), "down_proj": (M, F)}

    def pairs() -> Pairs:
        drawn = {n: (torch.randn(rank, i).to(dtype), torch.randn(o, rank).to(dtype)) for n, (o, i) in sizes.items()}
        changes: dict[str, tuple[Tensor | None, Tensor | None]] = dict.fromkeys(sizes, (None, None))
        changes["v_proj"], changes["down_proj"] = (torch.randn(KV), None), (torch.randn(M), torch.randn(M))
        rankless = {"gate_proj": (torch.empty(0, M, dtype=dtype), torch.empty(F, 0, dtype=dtype), None, torch.randn(F))}
        return {n: (*drawn[n], *changes[n]) for n in sizes} | rankless

    return [pairs() for _ in range(NUM_LAYERS)]


def _step(dtype: torch.dtype) -> tuple[FusedStep, Caches, Tensor]:
    """Three sequences: a prefill chunk of 7 at context 40, one decode at 33, a prefill of 13."""
    news, contexts = (7, 1, 13), (40, 33, 13)
    tables = torch.tensor([[8, 2, 5], [1, 7, 3], [4, -1, -1]], dtype=torch.int32)
    rows = [(b, p) for b in range(3) for p in range(contexts[b] - news[b], contexts[b])]
    positions = torch.tensor([p for _, p in rows], dtype=torch.int32)
    slots = torch.tensor(
        [int(tables[b, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for b, p in rows], dtype=torch.int32
    )
    meta = AttentionMeta(
        torch.tensor([0, 7, 8, 21], dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32), tables, 13
    )
    caches = torch.randn(NUM_LAYERS, 2, 9, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim).to(dtype)
    return (
        FusedStep(positions, slots, torch.randn(48, 16), meta),
        [(c[0], c[1]) for c in caches],
        torch.randn(21, M).to(dtype),
    )


def _adapt(
    y: Tensor, x: Tensor, layer: int, widths: Sequence[tuple[str, int]], rows: Sequence[tuple[int, int, list[Pairs]]]
) -> None:
    start = 0
    for name, width in widths:
        segments = [LoraSegment(s, e, *adapter[layer][name]) for s, e, adapter in rows if name in adapter[layer]]
        if segments:
            kernels.lora_add_(y[:, start : start + width], x, segments)
        start += width


def _op_by_op(
    layers: Sequence[LayerTensors],
    residual: Tensor,
    step: FusedStep,
    caches: Caches,
    adapters: Sequence[tuple[int, int, list[Pairs]]],
) -> Tensor:
    num_tokens, branch = residual.shape[0], torch.zeros_like(residual)
    for i, w in enumerate(layers):
        x, residual = kernels.add_rms_norm(branch, residual, w.input_norm_M, SHAPE.norm_eps)
        qkv = kernels.linear(x, w.qkv_NM, w.qkv_bias_N)
        _adapt(qkv, x, i, [("q_proj", Q), ("k_proj", KV), ("v_proj", KV)], adapters)
        q, k, v = (part.view(num_tokens, -1, SHAPE.head_dim) for part in qkv.split([Q, KV, KV], dim=1))
        if w.q_norm_D is not None and w.k_norm_D is not None:
            q, k = kernels.rms_norm(q, w.q_norm_D, SHAPE.norm_eps), kernels.rms_norm(k, w.k_norm_D, SHAPE.norm_eps)
        if HAS_ROPE[i]:
            kernels.rope_(q, k, step.positions_T, step.cos_sin_SR)
        kernels.write_kv(k, v, *caches[i], step.slots_T)
        o = kernels.paged_attention(q, *caches[i], step.meta, SHAPE.scale, WINDOWS[i]).view(num_tokens, Q)
        branch = kernels.linear(o, w.o_MN, w.o_bias_M)
        _adapt(branch, o, i, [("o_proj", M)], adapters)
        x, residual = kernels.add_rms_norm(branch, residual, w.mlp_norm_M, SHAPE.norm_eps)
        gate_up = kernels.linear(x, w.gate_up_NM, w.gate_up_bias_N)
        _adapt(gate_up, x, i, [("gate_proj", F), ("up_proj", F)], adapters)
        inner = kernels.silu_mul(gate_up)
        branch = kernels.linear(inner, w.down_MF, w.down_bias_M)
        _adapt(branch, inner, i, [("down_proj", M)], adapters)
    return residual + branch


def _fused(layers: Sequence[LayerTensors], dtype: torch.dtype, caches: Caches) -> FusedDecoder:
    decoder = FusedDecoder(SHAPE, NUM_LAYERS, dtype)
    for i, layer in enumerate(layers):
        decoder.set_layer(i, layer, HAS_ROPE[i], WINDOWS[i])
    decoder.set_caches(caches)
    return decoder


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_extras", [False, True])
@pytest.mark.parametrize("norms", ["same", "float32"])
@pytest.mark.parametrize("num_adapters", [0, 2])
def test_fused_layers_give_the_bits_of_the_single_ops(
    dtype: torch.dtype, has_extras: bool, norms: str, num_adapters: int
) -> None:
    torch.manual_seed(3)
    layers = [_weights(dtype, dtype if norms == "same" else torch.float32, has_extras) for _ in range(NUM_LAYERS)]
    step, caches, hidden = _step(dtype)
    rows = [(0, 5, _adapter(dtype, 4)), (8, 21, _adapter(dtype, 9))][:num_adapters]
    own_caches = [(k.clone(), v.clone()) for k, v in caches]
    expected = _op_by_op(layers, hidden.clone(), step, own_caches, rows)
    decoder = _fused(layers, dtype, caches)
    packed = [(start, end, PackedAdapter(adapter)) for start, end, adapter in rows]
    decoder.run(hidden, step, 0, 1, packed)
    decoder.run(hidden, step, 1, NUM_LAYERS, packed)
    assert torch.equal(hidden, expected)
    for ours, theirs in zip(caches, own_caches, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_what_lies_outside_is_refused_before_anything_is_written() -> None:
    step, caches, hidden = _step(torch.float32)
    layers = [_weights(torch.float32, torch.float32, False) for _ in range(NUM_LAYERS)]
    decoder, before = _fused(layers, torch.float32, caches), hidden.clone()
    outside = (
        FusedStep(step.positions_T + 40, step.slots_T, step.cos_sin_SR, step.meta),
        FusedStep(step.positions_T, step.slots_T + 100, step.cos_sin_SR, step.meta),
    )
    for bad in outside:
        with pytest.raises(IndexError):
            decoder.run(hidden, bad, 0, NUM_LAYERS)
    with pytest.raises(IndexError, match="adapter rows"):
        decoder.run(hidden, step, 0, 1, [(5, 22, PackedAdapter([{}] * NUM_LAYERS))])
    assert torch.equal(hidden, before)


def test_a_weight_of_another_layout_is_refused_with_its_name() -> None:
    decoder = FusedDecoder(SHAPE, NUM_LAYERS, torch.bfloat16)
    with pytest.raises(ValueError, match=r"qkv_NM is torch\.float32"):
        decoder.set_layer(0, _weights(torch.float32, torch.bfloat16, False))

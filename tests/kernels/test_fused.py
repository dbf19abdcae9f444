"""A fused run of layers gives the bits of the single ops, with and without adapters."""

from collections.abc import Sequence
from dataclasses import replace

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
    Rope,
)
from tests.kernels.paged import DTYPES

pytestmark = pytest.mark.usefixtures("compiled")

SHAPE = LayerShape(num_heads=6, num_kv_heads=2, head_dim=16, model_dim=72, ffn_dim=101, norm_eps=1e-5, scale=0.25)
SHAPES = {
    "llama": SHAPE,
    "granite": replace(SHAPE, residual_scale=0.22),
    "olmo2": replace(SHAPE, is_qk_norm_wide=True),
    "gemma2": replace(SHAPE, softcap=3.0, activation="gelu_pytorch_tanh"),
    "gpt2": replace(SHAPE, activation="gelu_new", is_gated=False, is_layer_norm=True, is_transposed=True),
    "opt": replace(SHAPE, activation="relu", is_gated=False, is_layer_norm=True),
}
NUM_LAYERS, BLOCK_SIZE = 3, 16
WINDOWS = (None, 8, None)
ROPES = (Rope.MAIN, Rope.SLIDING, Rope.NONE)
Q, KV = SHAPE.num_heads * SHAPE.head_dim, SHAPE.num_kv_heads * SHAPE.head_dim
M, F = SHAPE.model_dim, SHAPE.ffn_dim
Pairs = dict[str, tuple[Tensor, Tensor, Tensor | None, Tensor | None]]
Caches = list[tuple[Tensor, Tensor]]


def _weights(dtype: torch.dtype, norm_dtype: torch.dtype, has_extras: bool, family: str = "llama") -> LayerTensors:
    shape = SHAPES[family]
    is_behind, is_around = family == "olmo2", family == "gemma2"
    wide = (Q, KV) if shape.is_qk_norm_wide else (shape.head_dim, shape.head_dim)

    def matrix(rows: int, columns: int) -> Tensor:
        weights = (torch.randn(rows, columns) * columns**-0.5).to(dtype)
        return weights.T.contiguous().T if shape.is_transposed else weights

    def norm(dim: int, is_there: bool = True) -> Tensor | None:
        return torch.randn(dim).to(norm_dtype) if is_there else None

    return LayerTensors(
        input_norm_M=norm(M, not is_behind),
        input_norm_bias_M=norm(M, shape.is_layer_norm),
        qkv_NM=matrix(Q + 2 * KV, M),
        qkv_bias_N=torch.randn(Q + 2 * KV).to(dtype) if has_extras else None,
        q_norm_D=norm(wide[0], has_extras or is_behind),
        k_norm_D=norm(wide[1], has_extras or is_behind),
        o_MN=matrix(M, Q),
        o_bias_M=torch.randn(M).to(dtype) if has_extras else None,
        attention_post_norm_M=norm(M, is_behind or is_around),
        mlp_norm_M=norm(M, not is_behind),
        mlp_norm_bias_M=norm(M, shape.is_layer_norm),
        gate_up_NM=matrix((1 + shape.is_gated) * F, M),
        gate_up_bias_N=torch.randn((1 + shape.is_gated) * F).to(dtype) if has_extras else None,
        down_MF=matrix(M, F),
        down_bias_M=torch.randn(M).to(dtype) if has_extras else None,
        mlp_post_norm_M=norm(M, is_behind or is_around),
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
        FusedStep(positions, slots, torch.randn(48, 16), meta, torch.randn(48, 16)),
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


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    if weight is None:
        return x
    return kernels.rms_norm(x, weight, 1e-5) if bias is None else kernels.layer_norm(x, weight, bias, 1e-5)


def _attention(w: LayerTensors, x: Tensor, i: int, step: FusedStep, caches: Caches, shape: LayerShape) -> Tensor:
    """Everything between the two projections. x: queries, keys and values side by side."""
    q, k, v = x.split([Q, KV, KV], dim=1)
    if shape.is_qk_norm_wide:
        q, k = _norm(q, w.q_norm_D), _norm(k, w.k_norm_D)
    q, k, v = (part.view(x.shape[0], -1, shape.head_dim) for part in (q, k, v))
    if not shape.is_qk_norm_wide:
        q, k = _norm(q, w.q_norm_D), _norm(k, w.k_norm_D)
    if ROPES[i] is not Rope.NONE:
        table = step.cos_sin_SR if ROPES[i] is Rope.MAIN else step.sliding_cos_sin_SR
        assert table is not None
        kernels.rope_(q, k, step.positions_T, table)
    kernels.write_kv(k, v, *caches[i], step.slots_T)
    return kernels.paged_attention(q, *caches[i], step.meta, shape.scale, WINDOWS[i], shape.softcap).view(-1, Q)


def _op_by_op(
    layers: Sequence[LayerTensors],
    residual: Tensor,
    step: FusedStep,
    caches: Caches,
    adapters: Sequence[tuple[int, int, list[Pairs]]],
    shape: LayerShape = SHAPE,
) -> Tensor:
    halves = [("gate_proj", F), ("up_proj", F)] if shape.is_gated else [("up_proj", F)]
    for i, w in enumerate(layers):
        x = _norm(residual, w.input_norm_M, w.input_norm_bias_M)
        qkv = kernels.linear(x, w.qkv_NM, w.qkv_bias_N)
        _adapt(qkv, x, i, [("q_proj", Q), ("k_proj", KV), ("v_proj", KV)], adapters)
        o = _attention(w, qkv, i, step, caches, shape)
        branch = kernels.linear(o, w.o_MN, w.o_bias_M)
        _adapt(branch, o, i, [("o_proj", M)], adapters)
        residual = residual + _norm(branch, w.attention_post_norm_M) * shape.residual_scale
        x = _norm(residual, w.mlp_norm_M, w.mlp_norm_bias_M)
        gate_up = kernels.linear(x, w.gate_up_NM, w.gate_up_bias_N)
        _adapt(gate_up, x, i, halves, adapters)
        inner = kernels.activate(gate_up, shape.activation, shape.is_gated)
        branch = kernels.linear(inner, w.down_MF, w.down_bias_M)
        _adapt(branch, inner, i, [("down_proj", M)], adapters)
        residual = residual + _norm(branch, w.mlp_post_norm_M) * shape.residual_scale
    return residual


def _fused(
    layers: Sequence[LayerTensors], dtype: torch.dtype, caches: Caches, shape: LayerShape = SHAPE
) -> FusedDecoder:
    decoder = FusedDecoder(shape, NUM_LAYERS, dtype)
    for i, layer in enumerate(layers):
        decoder.set_layer(i, layer, ROPES[i], WINDOWS[i])
    decoder.set_caches(caches)
    return decoder


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_extras", [False, True])
@pytest.mark.parametrize("norms", ["same", "float32"])
@pytest.mark.parametrize("num_adapters", [0, 2])
@pytest.mark.parametrize("family", SHAPES)
def test_fused_layers_give_the_bits_of_the_single_ops(
    family: str, dtype: torch.dtype, has_extras: bool, norms: str, num_adapters: int
) -> None:
    torch.manual_seed(3)
    norm_dtype, shape = dtype if norms == "same" else torch.float32, SHAPES[family]
    layers = [_weights(dtype, norm_dtype, has_extras, family) for _ in range(NUM_LAYERS)]
    step, caches, hidden = _step(dtype)
    rows = [(0, 5, _adapter(dtype, 4)), (8, 21, _adapter(dtype, 9))][:num_adapters]
    own_caches = [(k.clone(), v.clone()) for k, v in caches]
    expected = _op_by_op(layers, hidden.clone(), step, own_caches, rows, shape)
    decoder = _fused(layers, dtype, caches, shape)
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

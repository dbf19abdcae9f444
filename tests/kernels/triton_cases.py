"""The Triton kernels against float64 truth and the reference: collected by test_triton.py in a process of its own.

Interpreting is decided when triton is imported, and another test may have imported it before.
"""

import pytest
import torch

from nearline.kernels import (
    LoraSegment,
    QuantMatrix,
    reference,
    triton_attention,
    triton_lora,
    triton_quant,
    triton_rows,
    triton_sampling,
)
from nearline.kernels.quant import GROUPS
from tests.kernels.paged import DTYPES, ULP, naive_attention, paged_problem

BY_DTYPE = pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=pytest.mark.slow) if d == torch.float16 else d for d in DTYPES], ids=str
)


def assert_rounded_from(result: torch.Tensor, truth: torch.Tensor, noise: float = 4e-6) -> None:
    """As in paged.py, but the interpreter cuts bfloat16 off instead of rounding: twice the error."""
    steps = 2 if result.dtype == torch.bfloat16 else 1
    allowed = steps * ULP[result.dtype] * truth.float().abs() + noise
    assert torch.all((result.float() - truth.float()).abs() <= allowed)


@BY_DTYPE
@pytest.mark.parametrize("dim", [5, 64, 97])
def test_norms(dim: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(3, dim + 2).to(dtype)[:, 1:-1], torch.randn(3, dim).to(dtype)
    w = torch.randn(dim)
    assert_rounded_from(triton_rows.rms_norm(x, w, 1e-5), reference.rms_norm(x.float(), w, 1e-5))
    expected = x.float() + residual.float()
    normed = triton_rows.rms_norm(x, w, 1e-5, residual)
    assert_rounded_from(residual, expected)
    assert_rounded_from(normed, reference.rms_norm(residual.float(), w, 1e-5))
    assert triton_rows.rms_norm(x[:0], w, 1e-5).shape == (0, dim)


@BY_DTYPE
@pytest.mark.parametrize("rotated", [16, 24])
def test_rope_rotates_slices_in_place(rotated: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(3, 24 * 4).to(dtype)
    exact = qkv.float()
    table, positions = torch.randn(9, rotated), torch.tensor([8, 0, 3], dtype=torch.int32)
    for rows, rope in ((qkv, triton_rows.rope_), (exact, reference.rope_)):
        rope(rows[:, :48].view(3, 2, 24), rows[:, 48:72].view(3, 1, 24), positions, table)
    assert_rounded_from(qkv, exact)


@BY_DTYPE
@pytest.mark.parametrize("rotated", [16, 24])
def test_rope_and_write_in_one_launch_are_the_two_ops(rotated: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(4, 24 * 5).to(dtype)
    table, positions = torch.randn(9, rotated), torch.tensor([8, 0, 3, 1], dtype=torch.int32)
    slots = torch.tensor([7, -1, 0, 19], dtype=torch.int32)
    results = []
    for is_one in (True, False):
        rows, caches = qkv.clone(), torch.zeros(2, 5, 1, 4, 24, dtype=dtype).unbind(0)
        q, k, v = rows[:, :72].view(4, 3, 24), rows[:, 72:96].view(4, 1, 24), rows[:, 96:].view(4, 1, 24)
        if is_one:
            triton_rows.rope_write_(q, k, v, (positions, table), (caches[0], caches[1]), slots)
        else:
            triton_rows.rope_(q, k, positions, table)
            triton_rows.write_kv(k, v, caches[0], caches[1], slots)
        results.append((rows, *caches))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@BY_DTYPE
def test_write_kv_skips_negative_slots(dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 4, 2, 24).to(dtype)
    slots = torch.tensor([7, -1, 0, 19], dtype=torch.int32)
    ours, theirs = torch.zeros(2, 2, 5, 2, 4, 24, dtype=dtype).unbind(0)
    triton_rows.write_kv(k, v, ours[0], ours[1], slots)
    reference.write_kv(k, v, theirs[0], theirs[1], slots)
    assert torch.equal(ours, theirs)


@BY_DTYPE
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 74).to(dtype)
    for is_gated in (True, False):
        result = triton_rows.activate(x, activation, is_gated)
        assert_rounded_from(result, reference.activate(x.float(), activation, is_gated))


@BY_DTYPE
def test_layer_norm(dtype: torch.dtype) -> None:
    x, w, b = torch.randn(3, 99).to(dtype)[:, 1:-1] + 2, torch.randn(97), torch.randn(97)
    assert_rounded_from(triton_rows.layer_norm(x, w, b, 1e-5), reference.layer_norm(x.float(), w, b, 1e-5))


@BY_DTYPE
@pytest.mark.parametrize(
    ("heads", "block_size", "window", "softcap", "lengths"),
    [
        ((6, 2, 16), 16, None, None, [(1, 1), (1, 37), (5, 5), (9, 50)]),
        ((3, 3, 8), 4, 3, 0.7, [(9, 9), (1, 30)]),
        ((7, 1, 40), 5, 7, None, [(13, 17), (1, 1)]),
        ((4, 2, 24), 16, None, 2.0, [(1, 1100), (1, 3), (1, 512)]),
        ((4, 2, 24), 16, 600, None, [(1, 1100), (1, 3)]),
    ],
)
def test_attention_equals_dense_softmax(
    heads: tuple[int, int, int],
    block_size: int,
    window: int | None,
    softcap: float | None,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
) -> None:
    p = paged_problem(lengths, heads, block_size, dtype)
    result = triton_attention.paged_attention(p.q_THD, p.k_cache, p.v_cache, p.meta, 0.3, window, softcap)
    assert_rounded_from(result, naive_attention(p, 0.3, window, softcap), noise=1e-5)


@BY_DTYPE
@pytest.mark.parametrize(("bits", "tokens"), [(8, 3), (4, 3), (4, 20)])
def test_products_with_quantised_weights(bits: int, tokens: int, dtype: torch.dtype) -> None:
    rows, dim, group = 70, 200, GROUPS[bits]
    blocks, groups = -(-rows // 16), -(-dim // group)
    codes = torch.randint(0, 256, (blocks, groups * group * 16 * bits // 8), dtype=torch.uint8)
    scales, offsets = (torch.randn(2, blocks, groups * 16) * 0.01).to(torch.bfloat16)
    matrix = QuantMatrix(codes, scales, offsets if bits == 4 else None, (rows, dim))
    x, bias = torch.randn(tokens, dim + 8).to(dtype)[:, :dim], torch.randn(rows).to(dtype)
    weights = matrix.dequantised(dtype).float()
    if dtype == torch.bfloat16:  # the interpreter cuts weights off instead of rounding
        weights = (matrix.dequantised(torch.float32).view(torch.int32) & -65536).view(torch.float32)
    exact = x.float() @ weights.T
    for bias_N, out in ((None, None), (bias, torch.float32)):
        result = triton_quant.quant_linear(x, matrix, bias_N, out)
        assert_rounded_from(result, exact if bias_N is None else exact + bias.float(), noise=2e-5)


WISHES = [
    (0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.3, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (0.9, 0, 1.0, 0.1),
    (1.1, 40, 0.6, 0.02), (2.0, 3, 0.5, 0.0), (1.0, 0, 1e-6, 0.0),
]  # fmt: skip
"""(temperature, top_k, top_p, min_p)"""


def test_sampling_chooses_what_the_reference_chooses() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(WISHES) + 3, 300, generator=generator)[:, :283] * 3
    logits[2, 10:40] = logits[2].max() - 1  # ties at the k-th
    logits[3, 50:60] = logits[3, 60]
    rows = [(torch.rand((), generator=generator), 1 / t if t else 0.0, k, p, m) for t, k, p, m in WISHES]
    wishes = torch.tensor([*rows, rows[1], rows[1], rows[0]], dtype=torch.float64).T.contiguous()
    logits[-3, 7], logits[-2], logits[-1, 9] = float("nan"), float("-inf"), float("inf")
    chosen = triton_sampling.sample(logits, wishes)
    assert chosen.tolist() == reference.sample(logits, wishes).tolist()
    assert chosen[0] == logits[0].argmax()
    assert chosen[-3:].tolist() == [-1, -1, -1]


def test_sampling_reaches_every_kept_token_and_no_other() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0, 2.0, 1.0]]).repeat(16, 1)
    points = torch.arange(16, dtype=torch.float64) / 16
    wishes = torch.stack([points, *(torch.full((16,), w, dtype=torch.float64) for w in (1.0, 3, 1.0, 0.0))])
    counts = triton_sampling.sample(logits, wishes).bincount(minlength=5)
    assert counts.tolist() == reference.sample(logits, wishes).bincount(minlength=5).tolist()
    assert counts[[0, 2]].tolist() == [0, 0]
    shares = torch.tensor([2.0, 2.0, 1.0]).softmax(0) * 16
    assert torch.all((counts[[1, 3, 4]] - shares).abs() <= 1)


@BY_DTYPE
def test_lora_adds_segments_of_different_ranks_to_a_column_slice(dtype: torch.dtype) -> None:
    x, wide, shift = torch.randn(23, 72).to(dtype), torch.randn(23, 190).to(dtype), torch.randn(137)
    segments = [
        LoraSegment(1, 2, torch.randn(8, 72).to(dtype), torch.randn(137, 8).to(dtype)),
        LoraSegment(4, 23, torch.randn(17, 72).to(dtype), torch.randn(17, 137).to(dtype).T),
        LoraSegment(0, 1, torch.randn(0, 72).to(dtype), torch.randn(137, 0).to(dtype), None, shift),
        LoraSegment(23, 23, torch.randn(3, 72).to(dtype), torch.randn(137, 3).to(dtype)),
    ]
    expected = wide.float()
    expected[:1, 20:157] += shift
    for s in segments:
        expected[s.start : s.end, 20:157] += (x[s.start : s.end].float() @ s.a_RM.float().T) @ s.b_NR.float().T
    triton_lora.lora_add_(wide[:, 20:157], x, segments)
    assert_rounded_from(wide, expected, noise=1e-4)

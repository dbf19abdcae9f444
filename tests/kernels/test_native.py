"""The compiled ops against float64 truth and the reference, on every build this CPU can run."""

import itertools

import pytest
import torch

from nearline.kernels import LoraSegment, native, reference
from tests.kernels.paged import DTYPES, assert_rounded_from, paged_problem, solved_problem

pytestmark = pytest.mark.usefixtures("every_tier")


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 70])
@pytest.mark.parametrize("dim", [1, 15, 64, 577])
def test_rms_norm_divides_by_the_root_mean_square(rows: int, dim: int, dtype: torch.dtype) -> None:
    wide = _random(rows, dim + 9, dtype=dtype)
    x = wide[:, 3 : 3 + dim]  # a column slice: rows are not adjacent
    for w in (_random(dim, dtype=dtype, seed=1), _random(dim, dtype=torch.float32, seed=1)):
        result = native.rms_norm(x, w, 1e-5)
        assert result is not None
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
        assert_rounded_from(result, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_updates_the_residual_in_place(dtype: torch.dtype) -> None:
    x, residual = _random(5, 97, dtype=dtype), _random(5, 97, dtype=dtype, seed=1)
    w = _random(97, dtype=dtype, seed=2)
    expected_residual = (x.float() + residual.float()).to(dtype)
    normed = native.rms_norm(x, w, 1e-6, residual)
    assert normed is not None
    assert torch.equal(residual, expected_residual)
    assert_rounded_from(normed, reference.rms_norm(expected_residual.float(), w.float(), 1e-6))


def test_heads_of_a_fused_projection_are_normalised_each_alone() -> None:
    qkv = _random(4, 80, dtype=torch.float32)
    q_THD = qkv[:, :48].view(4, 3, 16)
    result = native.rms_norm(q_THD, torch.ones(16), 1e-5)
    assert result is not None
    assert_rounded_from(result, reference.rms_norm(q_THD, torch.ones(16), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotated", [16, 40, 64])
def test_rope_rotates_slices_of_a_fused_projection(rotated: int, dtype: torch.dtype) -> None:
    table = torch.randn(50, rotated)
    positions = torch.tensor([0, 49, 7, 7, 30], dtype=torch.int32)
    ours, exact = _random(5, 64 * 6, dtype=dtype), _random(5, 64 * 6, dtype=dtype).float()
    for qkv, rope in ((ours, native.rope_), (exact, reference.rope_)):
        rope(qkv[:, : 64 * 3].view(5, 3, 64), qkv[:, 64 * 3 : 64 * 5].view(5, 2, 64), positions, table)
    assert_rounded_from(ours, exact)
    assert torch.equal(ours[:, 64 * 5 :], _random(5, 64 * 6, dtype=dtype)[:, 64 * 5 :])


def test_rope_refuses_a_position_outside_its_table() -> None:
    q, k = torch.zeros(1, 1, 8), torch.zeros(1, 1, 8)
    with pytest.raises(IndexError, match="rotary table"):
        native.rope_(q, k, torch.tensor([4]), torch.zeros(4, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_write_kv_stores_each_token_at_its_slot_and_skips_negative_ones(
    dtype: torch.dtype, slot_dtype: torch.dtype
) -> None:
    k, v = _random(4, 2, 24, dtype=dtype), _random(4, 2, 24, dtype=dtype, seed=1)
    k_cache, v_cache = torch.zeros(2, 5, 2, 4, 24, dtype=dtype).unbind(0)
    assert native.write_kv(k, v, k_cache, v_cache, torch.tensor([7, -1, 0, 19], dtype=slot_dtype))
    for token, slot in ((0, 7), (2, 0), (3, 19)):
        assert torch.equal(k_cache[slot // 4, :, slot % 4], k[token])
        assert torch.equal(v_cache[slot // 4, :, slot % 4], v[token])
    assert int((k_cache != 0).any(-1).sum()) == 3 * 2


def test_write_kv_refuses_a_slot_outside_the_cache() -> None:
    k, cache = torch.zeros(1, 1, 8), torch.zeros(2, 1, 4, 8)
    with pytest.raises(IndexError, match="slot"):
        native.write_kv(k, k, cache, cache, torch.tensor([8]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), [(0, 8), (1, 1), (3, 31), (40, 640)])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activate_gates_or_not(rows: int, dim: int, activation: str, dtype: torch.dtype) -> None:
    x = _random(rows, 2 * dim + 5, dtype=dtype)[:, : 2 * dim] * 8
    for is_gated in (True, False):
        result = native.activate(x, activation, is_gated)
        assert result is not None
        assert_rounded_from(result, reference.activate(x.double(), activation, is_gated), noise=2e-5)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations_hold_at_their_ends(activation: str) -> None:
    x = torch.tensor([[-1e30, -200.0, -60.0, -9.0, -0.0, 0.0, 9.0, 60.0, 200.0, 1e30]])
    result = native.activate(x, activation, is_gated=False)
    assert result is not None
    torch.testing.assert_close(result, reference.activate(x, activation, is_gated=False), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 70])
@pytest.mark.parametrize("dim", [1, 15, 64, 577])
def test_layer_norm_subtracts_the_mean(rows: int, dim: int, dtype: torch.dtype) -> None:
    x = (_random(rows, dim + 9, dtype=dtype) * 3 + 2)[:, 3 : 3 + dim]
    for norm_dtype in {dtype, torch.float32}:
        w, b = _random(dim, dtype=norm_dtype, seed=1), _random(dim, dtype=norm_dtype, seed=2)
        result = native.layer_norm(x, w, b, 1e-5)
        assert result is not None
        assert_rounded_from(result, torch.nn.functional.layer_norm(x.double(), (dim,), w.double(), b.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5, 70])
@pytest.mark.parametrize(("num_outputs", "dim"), [(1, 1), (7, 33), (66, 576), (129, 40)])
def test_linear_multiplies_by_the_transpose(num_tokens: int, num_outputs: int, dim: int, dtype: torch.dtype) -> None:
    x = _random(num_tokens, dim + 3, dtype=dtype)[:, 1 : 1 + dim]
    w, bias = _random(num_outputs, dim, dtype=dtype, seed=1), _random(num_outputs, dtype=dtype, seed=2)
    exact = x.double() @ w.double().T
    # Sums of `dim` products of unit size: their float32 error grows like sqrt(dim) · 2⁻²⁴.
    stored_in_out = w.T.contiguous().T
    for out_dtype, weight in itertools.product((None, torch.float32), (w, stored_in_out)):
        plain, biased = native.linear(x, weight, None, out_dtype), native.linear(x, weight, bias, out_dtype)
        assert plain is not None
        assert biased is not None
        assert plain.dtype == (out_dtype or dtype)
        assert_rounded_from(plain, exact, noise=2e-5)
        assert_rounded_from(biased, exact + bias.double(), noise=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lora_adds_each_adapter_to_its_rows_and_columns_alone(dtype: torch.dtype) -> None:
    x, wide = _random(23, 72, dtype=dtype), _random(23, 90, dtype=dtype, seed=1)
    before = wide.clone()
    y = wide[:, 20:57]
    segments = [
        LoraSegment(1, 2, _random(8, 72, dtype=dtype, seed=2), _random(37, 8, dtype=dtype, seed=3)),
        LoraSegment(4, 21, _random(3, 72, dtype=dtype, seed=4), _random(3, 37, dtype=dtype, seed=5).T),
        LoraSegment(
            21,
            22,
            _random(3, 72, dtype=dtype, seed=4),
            _random(37, 3, dtype=dtype, seed=5),
            _random(37, dtype=torch.float32),
        ),
        LoraSegment(
            22,
            23,
            x[:0],
            _random(37, 0, dtype=dtype),
            _random(37, dtype=torch.float32, seed=7),
            _random(37, dtype=torch.float32, seed=6),
        ),
    ]
    exact = before.double()
    for s in segments:
        exact[s.start : s.end, 20:57] *= 1 if s.gain_N is None else s.gain_N
        exact[s.start : s.end, 20:57] += 0 if s.shift_N is None else s.shift_N
        exact[s.start : s.end, 20:57] += x[s.start : s.end].double() @ s.a_RM.double().T @ s.b_NR.double().T
    assert native.lora_add_(y, x, segments)
    untouched = torch.ones(23, 90, dtype=torch.bool)
    untouched[1:2, 20:57] = untouched[4:23, 20:57] = False
    assert torch.equal(wide[untouched], before[untouched])
    assert_rounded_from(wide, exact, noise=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "block_size", "window", "lengths"),
    [
        ((6, 2, 16), 16, None, [(1, 1), (1, 37), (5, 5), (20, 50), (0, 9)]),
        ((3, 3, 8), 4, 3, [(9, 9), (1, 30)]),
        ((8, 1, 64), 32, None, [(1, 600), (3, 515)]),
        ((5, 1, 40), 5, 7, [(13, 17), (1, 1)]),
        ((2, 2, 128), 16, 520, [(1, 1100)]),
        ((4, 2, 24), 16, None, []),
    ],
)
def test_attention_equals_dense_softmax(
    heads: tuple[int, int, int],
    block_size: int,
    window: int | None,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
) -> None:
    if not lengths:
        lengths = [(0, 5)]
    p, exact = solved_problem(tuple(lengths), heads, block_size, dtype, (0.3, window, None))
    result = native.paged_attention(p.q_THD, p.k_cache, p.v_cache, p.meta, 0.3, window)
    assert result is not None
    assert_rounded_from(result, exact, noise=1e-5)


@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_saturate_at_the_softcap(dtype: torch.dtype, softcap: float) -> None:
    p, exact = solved_problem(((1, 37), (20, 50), (1, 600)), (6, 2, 16), 16, dtype, (2.0, 20, softcap))
    result = native.paged_attention(p.q_THD, p.k_cache, p.v_cache, p.meta, 2.0, 20, softcap)
    assert result is not None
    assert_rounded_from(result, exact, noise=4e-5)
    plain = reference.paged_attention(p.q_THD, p.k_cache, p.v_cache, p.meta, 2.0, 20, softcap)
    assert_rounded_from(plain, exact, noise=4e-5)


@pytest.mark.parametrize("damage", ["block", "context", "starts"])
def test_attention_refuses_meta_that_points_outside(damage: str) -> None:
    p = paged_problem([(2, 20)])
    if damage == "block":
        p.meta.block_tables_BN[0, 1] = 99
    elif damage == "context":
        p.meta.context_lens_B[0] = 99
    else:
        p.meta.query_starts_B1[1] = 3
    with pytest.raises(IndexError):
        native.paged_attention(p.q_THD, p.k_cache, p.v_cache, p.meta, 1.0)


def test_layouts_the_loops_cannot_read_are_declined() -> None:
    x = torch.randn(4, 8)
    assert native.linear(x.T.contiguous().T, torch.randn(3, 8), None, None) is None
    assert native.linear(x, torch.randn(3, 16)[:, ::2], None, None) is None
    assert native.linear(x, torch.randn(3, 9)[:, :8], None, None) is None
    assert native.linear(x, torch.randn(8, 4)[:, :3].T, None, None) is None
    assert native.linear(x, torch.randn(1, 8).expand(3, 8), None, None) is None
    assert native.linear(x, torch.randn(8, 3).T, torch.randn(6)[::2], None) is None
    assert native.rms_norm(x.double(), torch.ones(8), 1e-5) is None
    p = paged_problem([(1, 3)], heads=(2, 1, 12))
    assert native.paged_attention(p.q_THD, p.k_cache, p.v_cache, p.meta, 1.0) is None

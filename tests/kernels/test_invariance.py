"""Bit for bit: a row's result depends neither on its neighbours, nor on prefill chunks, threads or the run."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from nearline import kernels
from nearline.kernels import AttentionMeta, native
from tests.kernels.paged import DTYPES, Paged, assert_rounded_from, naive_attention, paged_problem

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_outputs", "dim"), [(70, 40), (130, 577)])
def test_a_row_of_linear_is_the_same_alone_and_in_any_batch(num_outputs: int, dim: int, dtype: torch.dtype) -> None:
    x, w = torch.randn(300, dim).to(dtype), torch.randn(num_outputs, dim).to(dtype)
    if dtype == torch.bfloat16 and native.has_tile_units():
        x = x[:31]  # larger batches go to torch there
    whole = kernels.linear(x, w)
    stored_in_out = w.T.contiguous().T
    turned = kernels.linear(x, stored_in_out)
    for start, end in ((0, 1), (1, 3), (3, 6), (6, 10), (10, 31), (31, 231)):
        assert torch.equal(kernels.linear(x[start:end], w), whole[start:end])
        assert torch.equal(kernels.linear(x[start:end], stored_in_out), turned[start:end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_the_small_ops_are_the_same_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    x, w = torch.randn(200, 402).to(dtype), torch.randn(402).to(dtype)
    a, b = torch.randn(8, 402).to(dtype), torch.randn(402, 8).to(dtype)
    normed, gated, adapted = kernels.rms_norm(x, w, 1e-5), kernels.activate(x, "silu"), x.clone()
    centred = kernels.layer_norm(x, w, w, 1e-5)
    kernels.lora_add_(adapted, x, [kernels.LoraSegment(0, 200, a, b)])
    for i in (0, 7, 199):
        row = x[i : i + 1]
        assert torch.equal(kernels.rms_norm(row, w, 1e-5)[0], normed[i])
        assert torch.equal(kernels.layer_norm(row, w, w, 1e-5)[0], centred[i])
        assert torch.equal(kernels.activate(row, "silu")[0], gated[i])
        alone = row.clone()
        kernels.lora_add_(alone, row, [kernels.LoraSegment(0, 1, a, b)])
        assert torch.equal(alone[0], adapted[i])


def _only(p: Paged, b: int, first: int, last: int) -> Tensor:
    """Attend with queries [first, last) of sequence b alone, as a prefill chunk would."""
    start = int(p.meta.query_starts_B1[b])
    num_new = int(p.meta.query_starts_B1[b + 1]) - start
    context = int(p.meta.context_lens_B[b]) - num_new + last
    meta = AttentionMeta(
        torch.tensor([0, last - first], dtype=torch.int32),
        torch.tensor([context], dtype=torch.int32),
        p.meta.block_tables_BN[b : b + 1].contiguous(),
        last - first,
    )
    return kernels.paged_attention(p.q_THD[start + first : start + last], p.k_cache, p.v_cache, meta, 0.3, _WINDOW)


_WINDOW = 700


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_the_same_alone_in_a_batch_and_in_chunks(dtype: torch.dtype) -> None:
    p = paged_problem([(1, 1300), (60, 560), (1, 3), (9, 9)], heads=(6, 2, 32), dtype=dtype)
    whole = kernels.paged_attention(p.q_THD, p.k_cache, p.v_cache, p.meta, 0.3, _WINDOW)
    assert torch.equal(_only(p, 0, 0, 1), whole[:1])  # alone, a long context is split over the threads
    for first, last in ((0, 60), (0, 1), (1, 14), (14, 60), (59, 60)):
        assert torch.equal(_only(p, 1, first, last), whole[1 + first : 1 + last])
    assert torch.equal(_only(p, 3, 2, 7), whole[64:69])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_and_runs_change_no_bit(dtype: torch.dtype) -> None:
    p = paged_problem([(1, 1100), (33, 70)], heads=(4, 2, 64), dtype=dtype)
    x, w = torch.randn(37, 300).to(dtype), torch.randn(2000, 300).to(dtype)
    results = []
    for num_threads in (1, 2, 5, 2, 2):
        kernels.set_num_threads(num_threads)
        attended = kernels.paged_attention(p.q_THD, p.k_cache, p.v_cache, p.meta, 0.3)
        results.append((attended, kernels.linear(x, w)))
    for attended, product in results[1:]:
        assert torch.equal(attended, results[0][0])
        assert torch.equal(product, results[0][1])


_lengths = st.tuples(st.integers(0, 40), st.integers(0, 60)).map(lambda pair: (pair[0], max(pair[0] + pair[1], 1)))


@st.composite
def _problems(draw: st.DrawFn) -> Paged:
    num_kv = draw(st.integers(1, 3))
    return paged_problem(
        lengths=draw(st.lists(_lengths, min_size=1, max_size=4)),
        heads=(num_kv * draw(st.integers(1, 9)), num_kv, draw(st.sampled_from([8, 16, 40, 64]))),
        block_size=draw(st.sampled_from([1, 3, 8, 16, 32])),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=60, deadline=None)
@given(p=_problems(), window=st.one_of(st.none(), st.integers(1, 50)))
def test_any_paged_problem_equals_dense_softmax(p: Paged, window: int | None) -> None:
    result = kernels.paged_attention(p.q_THD, p.k_cache, p.v_cache, p.meta, 0.2, window)
    assert_rounded_from(result, naive_attention(p, 0.2, window), noise=1e-5)

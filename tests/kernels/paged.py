"""Paged inputs for the attention tests, the dense truth behind them, and what a result may differ by."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nearline.kernels import AttentionMeta

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative step of one rounding. Ops compute in float32 and round once, so a result may differ from the float32
truth by half a step of its own size, plus the float32 error of long sums (1e-6 of the operands' size)."""


def assert_rounded_from(result: Tensor, truth: Tensor, noise: float = 4e-6) -> None:
    """Assert that `result` is `truth` rounded once to its dtype, up to the noise of float32 sums."""
    error = (result.float() - truth.float()).abs()
    allowed = ULP[result.dtype] * truth.float().abs() + noise
    assert torch.all(error <= allowed), f"worst error {error.max():.3g}, {(error / allowed).max():.1f} × allowed"


@dataclass(frozen=True)
class Paged:
    """One attention problem: the packed call and the dense keys and values [context, K, D] behind it.

    Blocks lie scattered, and whatever no query may read is NaN.
    """

    q_THD: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: AttentionMeta
    dense: list[tuple[Tensor, Tensor]]


def paged_problem(
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int, int] = (6, 2, 16),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Paged:
    """Make a problem of (new tokens, context) per sequence. heads = (H, K, D)."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv, head_dim = heads
    counts = [-(-context // block_size) for _, context in lengths]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks, generator=generator).tolist()
    caches = torch.full((2, num_blocks, num_kv, block_size, head_dim), float("nan"), dtype=dtype)
    tables = torch.full((len(lengths), max(counts, default=0)), -1, dtype=torch.int32)
    dense = []
    for b, (_, context) in enumerate(lengths):
        blocks = [order.pop() for _ in range(counts[b])]
        tables[b, : counts[b]] = torch.tensor(blocks, dtype=torch.int32)
        kv = torch.randn(2, context, num_kv, head_dim, generator=generator).to(dtype)
        for position in range(context):
            caches[:, blocks[position // block_size], :, position % block_size] = kv[:, position]
        dense.append((kv[0], kv[1]))
    news = torch.tensor([0] + [new for new, _ in lengths])
    q_THD = torch.randn(int(news.sum()), num_heads, head_dim, generator=generator).to(dtype)
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    meta = AttentionMeta(news.cumsum(0).to(torch.int32), contexts, tables, int(news.max()))
    return Paged(q_THD, caches[0], caches[1], meta, dense)


@functools.cache
def solved_problem(
    lengths: tuple[tuple[int, int], ...],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    scores: tuple[float, int | None, float | None],
) -> tuple[Paged, Tensor]:
    """Make a problem, not to be written to, and solve it naively once for all builds. scores = (scale, window, cap)."""
    problem = paged_problem(lengths, heads, block_size, dtype)
    return problem, naive_attention(problem, *scores)


def naive_attention(problem: Paged, scale: float, window: int | None = None, softcap: float | None = None) -> Tensor:
    """Compute the same in float64, one query and one head at a time, from the dense keys and values."""
    out = torch.empty(problem.q_THD.shape, dtype=torch.float64)
    group = problem.q_THD.shape[1] // problem.k_cache.shape[1]
    starts = problem.meta.query_starts_B1.tolist()
    for b, (k, v) in enumerate(problem.dense):
        num_new = starts[b + 1] - starts[b]
        for i in range(num_new):
            position = k.shape[0] - num_new + i
            first = 0 if window is None else max(0, position + 1 - window)
            for h in range(out.shape[1]):
                keys = k[first : position + 1, h // group].double()
                scores = keys @ problem.q_THD[starts[b] + i, h].double() * scale
                scores = scores if softcap is None else (scores / softcap).tanh() * softcap
                out[starts[b] + i, h] = scores.softmax(0) @ v[first : position + 1, h // group].double()
    return out

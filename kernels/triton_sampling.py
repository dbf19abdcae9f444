"""Triton sampling: one program per row walks its logits a few times instead of sorting them.

Thresholds (the k-th largest weight, the lightest of the nucleus) are found bit by bit: weights are not negative, so
their bits are ordered as they are.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
# Device code has no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOP_BIT = 29  # weights are at most 1.0, whose bits are 0x3f800000


@triton.jit
def _weights(row, begin, vocab, top, inverse, WIDTH: tl.constexpr):
    """The weights of `WIDTH` tokens, 0 past the vocabulary."""
    column = begin + tl.arange(0, WIDTH)
    logit = tl.load(row + column, mask=column < vocab, other=float("-inf"))
    return column, tl.exp((logit - top) * inverse)


@triton.jit
def _measure(row, vocab, top, inverse, bits, least, COUNTS: tl.constexpr, WIDTH: tl.constexpr):
    """How many weights have at least these bits, or what those of them weigh that are `least` or more."""
    found = tl.zeros([WIDTH], tl.float64)
    for begin in range(0, vocab, WIDTH):
        column, weight = _weights(row, begin, vocab, top, inverse, WIDTH)
        is_found = (weight.to(tl.int32, bitcast=True) >= bits) & (weight >= least) & (column < vocab)
        if COUNTS:
            found += tl.where(is_found, 1.0, 0.0)
        else:
            found += tl.where(is_found, weight.to(tl.float64), 0.0)
    return tl.sum(found, axis=0)


@triton.jit
def _highest(row, vocab, top, inverse, wanted, least, COUNTS: tl.constexpr, TOP_BIT: tl.constexpr, WIDTH: tl.constexpr):
    """The highest bits at which `_measure` still reaches `wanted`."""
    bits = (vocab * 0).to(tl.int32)
    step = bits + (1 << TOP_BIT)
    for _ in range(TOP_BIT + 1):
        reached = _measure(row, vocab, top, inverse, bits + step, least, COUNTS, WIDTH) >= wanted
        bits = tl.where(reached, bits + step, bits)
        step = step // 2
    return bits


@triton.jit
def _sample_kernel(logits, wishes, out, stride, vocab, num_rows, TOP_BIT: tl.constexpr, WIDTH: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    best = tl.full([WIDTH], float("-inf"), tl.float32)
    best_at = tl.zeros([WIDTH], tl.int32)
    bad = tl.zeros([WIDTH], tl.int32)
    for begin in range(0, vocab, WIDTH):
        column = begin + tl.arange(0, WIDTH)
        logit = tl.load(row + column, mask=column < vocab, other=float("-inf"))
        bad = tl.where((logit != logit) | (logit == float("inf")), 1, bad)
        best_at = tl.where(logit > best, column, best_at)
        best = tl.maximum(logit, best)
    top = tl.max(best, axis=0)
    greedy = tl.min(tl.where(best == top, best_at, vocab), axis=0)
    if (tl.max(bad, axis=0) > 0) | (top == float("-inf")):
        tl.store(out + index, -1)
        return
    point, inverse64 = tl.load(wishes + index), tl.load(wishes + num_rows + index)
    top_k, top_p = tl.load(wishes + 2 * num_rows + index), tl.load(wishes + 3 * num_rows + index)
    inverse, least = inverse64.to(tl.float32), tl.load(wishes + 4 * num_rows + index).to(tl.float32)
    if inverse == 0.0:
        tl.store(out + index, greedy.to(tl.int64))
        return
    if top_k > 0.0:
        bits = _highest(row, vocab, top, inverse, top_k, 0.0, True, TOP_BIT, WIDTH)
        least = tl.maximum(least, bits.to(tl.float32, bitcast=True))
    total = _measure(row, vocab, top, inverse, 0, least, False, WIDTH)
    edge, quota = least, vocab * 1.0  # of the tokens that weigh exactly `edge`, the first `quota` are kept
    if top_p < 1.0:
        bits = _highest(row, vocab, top, inverse, top_p * total, least, False, TOP_BIT, WIDTH)
        if bits > 0:
            heavier = _measure(row, vocab, top, inverse, bits + 1, least, False, WIDTH)
            edge = tl.maximum(edge, bits.to(tl.float32, bitcast=True))
            quota = tl.maximum(tl.ceil((top_p * total - heavier) / edge.to(tl.float64)), 1.0).to(tl.float32)
            equal = _measure(row, vocab, top, inverse, bits, least, False, WIDTH) - heavier
            total = heavier + tl.minimum(equal, quota.to(tl.float64) * edge.to(tl.float64))
    target, before, equals = point * total, total * 0.0, edge * 0.0
    found, last = vocab, vocab * 0
    for begin in range(0, vocab, WIDTH):
        column, weight = _weights(row, begin, vocab, top, inverse, WIDTH)
        is_equal = (weight == edge) & (column < vocab)
        rank = equals + tl.cumsum(tl.where(is_equal, 1.0, 0.0), axis=0)
        is_kept = ((weight > edge) | (is_equal & (rank <= quota))) & (weight > 0.0)
        mass = before + tl.cumsum(tl.where(is_kept, weight.to(tl.float64), 0.0), axis=0)
        found = tl.minimum(found, tl.min(tl.where(is_kept & (mass > target), column, vocab), axis=0))
        last = tl.maximum(last, tl.max(tl.where(is_kept, column, 0), axis=0))
        equals += tl.sum(tl.where(is_equal, 1.0, 0.0), axis=0)
        before = tl.max(mass, axis=0)
    tl.store(out + index, tl.minimum(found, last).to(tl.int64))


def sample(logits_SV: Tensor, wishes_5S: Tensor) -> Tensor:
    """Accept fp32 logits of any row stride."""
    num_rows, vocab = logits_SV.shape
    out_S = torch.empty(num_rows, dtype=torch.int64, device=logits_SV.device)
    if num_rows:
        width = min(4096, triton.next_power_of_2(vocab))
        _sample_kernel[(num_rows,)](
            logits_SV, wishes_5S, out_S, logits_SV.stride(0), vocab, num_rows, _TOP_BIT, width,
            num_warps=min(8, max(1, width // 256)),
        )  # fmt: skip
    return out_S

"""Triton low-rank additions for many adapters at once (SGMV): two launches per projection, whatever their number.

Source: Punica (segmented gather matrix-vector multiplication); here ranks may differ within a launch.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
# Device code has no Python types.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearline.kernels.types import LoraSegment

_TOKENS = 16
_IS_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _shrink_kernel(
    table, x, shrunk, x_stride, dim, max_rank,
    TOKENS: tl.constexpr, DIMS: tl.constexpr, RANKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    entry = table + tl.program_id(0) * 7
    start, end, rank = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    first = start + tl.program_id(1) * TOKENS
    if first >= end:
        return
    a = tl.load(entry + 3).to(tl.pointer_type(x.dtype.element_ty))
    token = first + tl.arange(0, TOKENS)
    ranks = tl.arange(0, RANKS)
    sums = tl.zeros([TOKENS, RANKS], tl.float32)
    for begin in range(0, dim, DIMS):
        column = begin + tl.arange(0, DIMS)
        is_x = (token[:, None] < end) & (column[None, :] < dim)
        xs = tl.load(x + token[:, None] * x_stride + column[None, :], mask=is_x, other=0.0)
        is_a = (ranks[:, None] < rank) & (column[None, :] < dim)
        rows = tl.load(a + ranks[:, None] * dim + column[None, :], mask=is_a, other=0.0)
        if UPCAST:
            xs = xs.to(tl.float32)
            rows = rows.to(tl.float32)
        sums += tl.dot(xs, tl.trans(rows), input_precision="ieee")
    place = shrunk + token[:, None] * max_rank + ranks[None, :]
    tl.store(place, sums, mask=(token[:, None] < end) & (ranks[None, :] < rank))


@triton.jit
def _expand_kernel(
    table, shrunk, y, y_stride, num_outputs, max_rank,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    entry = table + tl.program_id(0) * 7
    start, end, rank = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    first = start + tl.program_id(1) * TOKENS
    if first >= end:
        return
    b = tl.load(entry + 4).to(tl.pointer_type(y.dtype.element_ty))
    output_stride, rank_stride = tl.load(entry + 5), tl.load(entry + 6)
    token = first + tl.arange(0, TOKENS)
    ranks = tl.arange(0, RANKS)
    output = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_shrunk = (token[:, None] < end) & (ranks[None, :] < rank)
    inner = tl.load(shrunk + token[:, None] * max_rank + ranks[None, :], mask=is_shrunk, other=0.0)
    is_b = (output[None, :] < num_outputs) & (ranks[:, None] < rank)
    columns = tl.load(b + output[None, :] * output_stride + ranks[:, None] * rank_stride, mask=is_b, other=0.0)
    place = y + token[:, None] * y_stride + output[None, :]
    is_y = (token[:, None] < end) & (output[None, :] < num_outputs)
    before = tl.load(place, mask=is_y, other=0.0).to(tl.float32)
    after = before + tl.dot(inner, columns.to(tl.float32), input_precision="ieee")
    tl.store(place, after.to(y.dtype.element_ty), mask=is_y)


def lora_add_(y_TN: Tensor, x_TM: Tensor, segments: Sequence[LoraSegment]) -> bool:
    """Accept any row strides of x and y, both layouts of b, any rank from 1."""
    for segment in segments:
        _change_base_(y_TN[segment.start : segment.end], segment)
    kept = [segment for segment in segments if segment.end > segment.start and segment.a_RM.shape[0]]
    if not kept:
        return True
    pairs = [(s.a_RM.contiguous(), s.b_NR) for s in kept]
    table = torch.tensor(
        [
            (s.start, s.end, a.shape[0], a.data_ptr(), b.data_ptr(), b.stride(0), b.stride(1))
            for s, (a, b) in zip(kept, pairs, strict=True)
        ],
        dtype=torch.int64,
    ).to(y_TN.device, non_blocking=True)
    max_rank = max(a.shape[0] for a, _ in pairs)
    ranks = max(16, triton.next_power_of_2(max_rank))  # tl.dot needs 16
    shrunk = torch.empty((x_TM.shape[0], max_rank), dtype=torch.float32, device=y_TN.device)
    num_tiles = triton.cdiv(max(s.end - s.start for s in kept), _TOKENS)
    upcast = _IS_INTERPRETED or x_TM.dtype == torch.float32
    _shrink_kernel[(len(kept), num_tiles)](
        table, x_TM, shrunk, x_TM.stride(0), x_TM.shape[1], max_rank, _TOKENS, 64, ranks, upcast
    )
    num_outputs = y_TN.shape[1]
    _expand_kernel[(len(kept), num_tiles, triton.cdiv(num_outputs, 128))](
        table, shrunk, y_TN, y_TN.stride(0), num_outputs, max_rank, _TOKENS, 128, ranks
    )
    return True


def _change_base_(y_TN: Tensor, segment: LoraSegment) -> None:
    """Apply gain and shift, which few adapters have, by torch: one more rounding than in the reference."""
    if segment.gain_N is not None or segment.shift_N is not None:
        changed_TN = y_TN.float()
        if segment.gain_N is not None:
            changed_TN *= segment.gain_N
        if segment.shift_N is not None:
            changed_TN += segment.shift_N
        y_TN.copy_(changed_TN)

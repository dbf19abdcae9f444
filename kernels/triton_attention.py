"""Triton paged attention: decode and chunked prefill in one kernel, long decodes split over the context.

A program owns a run of query tokens of one sequence and one kv head; its rows are (token, query head of the group),
padded to powers of two. Split programs store their part, and a second kernel merges the parts.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
# Device code has no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearline.kernels.types import AttentionMeta

_SPLIT_POSITIONS = 512
_IS_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _absorb(queries, keys, values, is_seen, scale, softcap, top, total, value, HAS_CAP: tl.constexpr):
    """One step of the online softmax: take in a tile of positions."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if HAS_CAP:  # softcap · tanh(score / softcap)
        scores = softcap - 2.0 * softcap / (tl.exp(scores * (2.0 / softcap)) + 1.0)
    scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp(scores - safe_top[:, None])
    keep = tl.exp(top - safe_top)
    total = total * keep + tl.sum(weights, axis=1)
    value = value * keep[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_top, total, value


@triton.jit
def _attend_kernel(
    q, k_cache, v_cache, out, parts, tops, sums, starts, lens, tables,
    q_token, q_head, out_token, table_stride, num_kv, num_splits, scale, window, softcap,
    GROUP: tl.constexpr, GROUP_WIDTH: tl.constexpr, QUERIES: tl.constexpr, POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_WIDTH: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    HAS_CAP: tl.constexpr,
):  # fmt: skip
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    tile = tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    start = tl.load(starts + sequence)
    num_new = tl.load(starts + sequence + 1) - start
    if tile * QUERIES >= num_new:
        return
    context = tl.load(lens + sequence)
    row = tl.arange(0, QUERIES * GROUP_WIDTH)
    query = tile * QUERIES + row // GROUP_WIDTH
    member = row % GROUP_WIDTH
    is_row = (query < num_new) & (member < GROUP)
    at = context - num_new + query
    column = tl.arange(0, DIM_WIDTH)
    is_column, head = column < DIM, kv_head * GROUP + member
    token = (start + query).to(tl.int64)
    queries = tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + column[None, :],
        mask=is_row[:, None] & is_column[None, :], other=0.0,
    )  # fmt: skip
    if UPCAST:
        queries = queries.to(tl.float32)
    first = tl.maximum(context - num_new + tile * QUERIES - window + 1, 0)
    last = tl.minimum(context - num_new + (tile + 1) * QUERIES, context)
    if SPLIT > 0:
        first = tl.maximum(first, split * SPLIT)
        last = tl.minimum(last, (split + 1) * SPLIT)
    top = tl.full([QUERIES * GROUP_WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP_WIDTH], tl.float32)
    value = tl.zeros([QUERIES * GROUP_WIDTH, DIM_WIDTH], tl.float32)
    for begin in range(first // POSITIONS * POSITIONS, last, POSITIONS):
        position = begin + tl.arange(0, POSITIONS)
        is_position = (position >= first) & (position < last)
        block = tl.load(tables + sequence * table_stride + position // BLOCK, mask=is_position, other=0).to(tl.int64)
        line = (block * num_kv + kv_head) * BLOCK + position % BLOCK
        place = line[:, None] * DIM + column[None, :]
        is_place = is_position[:, None] & is_column[None, :]
        keys = tl.load(k_cache + place, mask=is_place, other=0.0)
        values = tl.load(v_cache + place, mask=is_place, other=0.0)
        if UPCAST:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        is_seen = (position[None, :] <= at[:, None]) & (position[None, :] > at[:, None] - window) & is_position[None, :]
        top, total, value = _absorb(queries, keys, values, is_seen, scale, softcap, top, total, value, HAS_CAP)
    if SPLIT > 0:
        index = (token * num_kv * GROUP + head) * num_splits + split
        tl.store(tops + index, top, mask=is_row)
        tl.store(sums + index, total, mask=is_row)
        tl.store(parts + index[:, None] * DIM + column[None, :], value, mask=is_row[:, None] & is_column[None, :])
    else:
        value = value / tl.where(total == 0.0, 1.0, total)[:, None]
        place = token[:, None] * out_token + head[:, None] * DIM + column[None, :]
        tl.store(out + place, value.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _merge_kernel(parts, tops, sums, out, num_splits, DIM: tl.constexpr, DIM_WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    is_split = split < num_splits
    column = tl.arange(0, DIM_WIDTH)
    is_column = column < DIM
    top = tl.load(tops + row * num_splits + split, mask=is_split, other=float("-inf"))
    factor = tl.exp(top - tl.max(top, axis=0))
    total = tl.sum(tl.load(sums + row * num_splits + split, mask=is_split, other=0.0) * factor, axis=0)
    place = parts + (row * num_splits + split[:, None]) * DIM + column[None, :]
    part = tl.load(place, mask=is_split[:, None] & is_column[None, :], other=0.0)
    value = tl.sum(part * factor[:, None], axis=0) / total
    tl.store(out + row * DIM + column, value.to(out.dtype.element_ty), mask=is_column)


def rows_per_program(is_decode: bool, head_bytes: int) -> int:
    """Rows of a program. tl.dot needs 16; wide heads leave less room for others."""
    return 16 if is_decode else 64 if head_bytes <= 512 else 32


def queries_per_program(rows: int, group_width: int) -> int:
    """Query tokens of a program that is to have so many rows."""
    return max(1, rows // group_width)


def positions_per_tile(dim_width: int, element_bytes: int) -> int:
    """Positions whose keys and values, in two stages, fit the shared memory of small devices too (99 KiB)."""
    return max(16, min(64, 64 * 256 // (dim_width * element_bytes)))


def paged_attention(
    q_THD: Tensor,
    k_cache_NKPD: Tensor,
    v_cache_NKPD: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Accept any token and head strides of q; caches and meta are contiguous."""
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    num_tokens, num_heads, head_dim = q_THD.shape
    _, num_kv, block_size, _ = k_cache_NKPD.shape
    num_sequences, table_width = meta.block_tables_BN.shape
    if not num_tokens or not num_sequences:
        return out_THD
    group = num_heads // num_kv
    group_width = triton.next_power_of_2(group)
    is_decode = meta.max_query_len == 1
    queries = queries_per_program(rows_per_program(is_decode, head_dim * q_THD.element_size()), group_width)
    num_splits = triton.cdiv(table_width * block_size, _SPLIT_POSITIONS) if is_decode else 1
    split = _SPLIT_POSITIONS if num_splits > 1 else 0
    part_shape = (num_tokens, num_heads, num_splits) if split else (0, 0, 0)
    parts, tops, sums = (
        torch.empty(shape, dtype=torch.float32, device=q_THD.device)
        for shape in ((*part_shape, head_dim), part_shape, part_shape)
    )
    dim_width = max(16, triton.next_power_of_2(head_dim))
    positions = positions_per_tile(dim_width, q_THD.element_size())
    grid = (triton.cdiv(meta.max_query_len, queries) * num_splits, num_kv, num_sequences)
    _attend_kernel[grid](
        q_THD, k_cache_NKPD, v_cache_NKPD, out_THD, parts, tops, sums,
        meta.query_starts_B1, meta.context_lens_B, meta.block_tables_BN,
        *q_THD.stride()[:2], num_heads * head_dim, table_width, num_kv, num_splits, scale, window or 2**30,
        softcap or 1.0, group, group_width, queries, positions, block_size, head_dim, dim_width, split,
        _IS_INTERPRETED or q_THD.dtype == torch.float32, softcap is not None, num_stages=2,
    )  # fmt: skip
    if split:
        _merge_kernel[(num_tokens * num_heads,)](
            parts, tops, sums, out_THD, num_splits, head_dim, dim_width, triton.next_power_of_2(num_splits)
        )
    return out_THD

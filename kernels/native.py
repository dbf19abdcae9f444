"""The compiled CPU path: loads the library, checks what it accepts and calls it with plain pointers.

Each function returns None (or False, if it works in place) when it declines: no library, another dtype, a layout its
loops do not read. The caller then takes the reference. A call costs 2-5 µs, so checks are few and cheap.
"""

import ctypes
import functools
import logging
from collections.abc import Sequence
from ctypes import c_float, c_int, c_long, c_void_p

import torch
from torch import Tensor

from nearline.kernels import build
from nearline.kernels.types import AttentionMeta, LoraSegment

log = logging.getLogger(__name__)

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""dtype → its number in vec.h."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "relu": 3}
"""transformers' name of an activation → its number in ops.h."""
_AMX_LINEAR_FROM = 32
"""Tokens from which torch's bf16 product (tile units) beats ours on CPUs that have them; not measured here."""

_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "nl_linear": (c_void_p, c_long, c_void_p, c_void_p, c_void_p, *[c_long] * 4, c_int, c_int),
    "nl_rms_norm": (c_void_p, c_long, c_void_p, c_long, c_void_p, c_int, c_void_p, *[c_long] * 3, c_float, c_int),
    "nl_rope": (*(c_void_p, c_long, c_long) * 2, c_long, c_void_p, c_long, c_void_p, c_long, c_long, c_int),
    "nl_write_kv": (*(c_void_p, c_long) * 2, *[c_void_p] * 3, *[c_long] * 5, c_int),
    "nl_activate": (c_void_p, c_long, c_void_p, c_long, c_long, *[c_int] * 3),
    "nl_layer_norm": (c_void_p, c_long, c_void_p, c_void_p, c_int, c_void_p, *[c_long] * 3, c_float, c_int),
    "nl_linear_columns": (c_void_p, c_long, c_void_p, c_void_p, c_void_p, *[c_long] * 4, c_int, c_int),
    "nl_attention": (c_void_p, c_long, *[c_void_p] * 3, c_long, *[c_void_p] * 3, *[c_long] * 9, *[c_float] * 2, c_int),
    "nl_lora": (c_void_p, c_long, c_void_p, c_long, c_long, c_void_p, c_long, c_int, c_int),
    "nl_decoder_layers": (c_void_p, c_void_p, c_long, c_long, c_void_p),
    "nl_quant_linear": (c_void_p, c_long, *[c_void_p] * 5, *[c_long] * 4, *[c_int] * 3),
    "nl_quant_rows": (*[c_void_p] * 5, *[c_long] * 4, *[c_int] * 2),
    "nl_set_num_threads": (c_int,),
}
_STATUS_OPS = ("nl_rope", "nl_write_kv", "nl_attention", "nl_decoder_layers", "nl_quant_rows", "nl_num_threads")
PROBLEMS = {
    1: "a block table names a block outside the cache",
    2: "a slot lies outside the cache",
    3: "a position lies outside the rotary table",
    4: "context_lens and query_starts disagree, or a context outgrows its block table",
    5: "a row lies outside the table",
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library, building it on first use; None (said once in the log) where that fails."""
    try:
        return load(build.library())
    except (build.BuildFailed, OSError) as failure:
        log.warning("CPU kernels are not compiled, plain torch ops are used: %s", failure)
        return None


def load(path: object) -> ctypes.CDLL:
    """Load a compiled library and declare its functions. Raises OSError."""
    lib = ctypes.CDLL(str(path))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, c_int if name in _STATUS_OPS else None
    lib.nl_set_num_threads(torch.get_num_threads())
    return lib


@functools.cache
def has_tile_units() -> bool:
    """Tell whether this CPU multiplies bf16 tiles (AMX), which torch uses and we do not."""
    return "amx_bf16" in build.cpu_flags()


def check(status: int) -> None:
    """Raise IndexError for a status other than 0."""
    if status:
        raise IndexError(PROBLEMS[status])


def _has_plain_rows(*tensors: Tensor) -> bool:
    return all(x.device.type == "cpu" and x.stride(-1) == 1 for x in tensors)


def _has_plain_heads(x_THD: Tensor) -> bool:
    return x_THD.device.type == "cpu" and x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]


def rms_norm(x_TM: Tensor, w_M: Tensor, eps: float, residual_TM: Tensor | None = None) -> Tensor | None:
    """Serve both norms; with a residual it is updated first. Accepts any row stride, and heads [T, H, D] too."""
    lib, code, w_code = library(), CODES.get(x_TM.dtype), CODES.get(w_M.dtype)
    if lib is None or code is None or not _has_plain_rows(x_TM, w_M) or w_code not in (code, 0):
        return None
    rows_NM = x_TM if x_TM.dim() == 2 else x_TM.reshape(-1, x_TM.shape[-1])
    residual, stride = None, 0
    if residual_TM is not None:
        if residual_TM.dtype != x_TM.dtype or residual_TM.dim() != 2 or not _has_plain_rows(residual_TM):
            return None
        residual, stride = residual_TM.data_ptr(), residual_TM.stride(0)
    y = torch.empty(x_TM.shape, dtype=x_TM.dtype)
    num_rows, dim = rows_NM.shape
    x, w, out = (rows_NM.data_ptr(), rows_NM.stride(0)), (w_M.data_ptr(), w_code), (y.data_ptr(), dim)
    lib.nl_rms_norm(*x, residual, stride, *w, *out, num_rows, dim, eps, code)
    return y


def rope_(q_THD: Tensor, k_TKD: Tensor, positions_T: Tensor, cos_sin_SR: Tensor) -> bool:
    """Accept heads adjacent within a token, any token stride (slices of a fused projection); int32 positions best."""
    lib, code = library(), CODES.get(q_THD.dtype)
    if lib is None or code is None or k_TKD.dtype != q_THD.dtype or cos_sin_SR.dtype != torch.float32:
        return False
    if not (_has_plain_heads(q_THD) and _has_plain_heads(k_TKD) and cos_sin_SR.is_contiguous()):
        return False
    num_tokens, num_heads, head_dim = q_THD.shape
    positions = positions_T.to(torch.int32).contiguous()
    q = (q_THD.data_ptr(), q_THD.stride(0), num_heads)
    k = (k_TKD.data_ptr(), k_TKD.stride(0), k_TKD.shape[1])
    table = (cos_sin_SR.data_ptr(), *cos_sin_SR.shape)
    check(lib.nl_rope(*q, *k, head_dim, positions.data_ptr(), num_tokens, *table, code))
    return True


def write_kv(k_TKD: Tensor, v_TKD: Tensor, k_cache_NKPD: Tensor, v_cache_NKPD: Tensor, slots_T: Tensor) -> bool:
    """Accept the layouts of rope_ and contiguous caches of the same dtype."""
    lib, code = library(), CODES.get(k_TKD.dtype)
    if lib is None or code is None or not (_has_plain_heads(k_TKD) and _has_plain_heads(v_TKD)):
        return False
    if not are_caches(k_cache_NKPD, v_cache_NKPD, k_TKD.dtype) or v_TKD.dtype != k_TKD.dtype:
        return False
    num_kv, head_dim = k_TKD.shape[1:]
    if k_cache_NKPD.shape[1] != num_kv or k_cache_NKPD.shape[3] != head_dim or v_TKD.shape != k_TKD.shape:
        raise ValueError(f"cache {tuple(k_cache_NKPD.shape)} does not hold keys {tuple(k_TKD.shape)}")
    slots = slots_T.to(torch.int32).contiguous()
    rows = (k_TKD.data_ptr(), k_TKD.stride(0), v_TKD.data_ptr(), v_TKD.stride(0))
    caches = (k_cache_NKPD.data_ptr(), v_cache_NKPD.data_ptr())
    check(lib.nl_write_kv(*rows, *caches, slots.data_ptr(), k_TKD.shape[0], *k_cache_NKPD.shape, code))
    return True


def are_caches(k_cache_NKPD: Tensor, v_cache_NKPD: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether the loops can read and write both caches."""
    return all(c.dtype == dtype and c.is_contiguous() and c.device.type == "cpu" for c in (k_cache_NKPD, v_cache_NKPD))


def paged_attention(
    q_THD: Tensor,
    k_cache_NKPD: Tensor,
    v_cache_NKPD: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor | None:
    """Accept the layouts of write_kv, head dims divisible by 8 and contiguous int32 meta with adjacent table rows."""
    lib, code = library(), CODES.get(q_THD.dtype)
    num_blocks, num_kv, block_size, head_dim = k_cache_NKPD.shape
    if lib is None or code is None or not _has_plain_heads(q_THD) or head_dim % 8:
        return None
    if q_THD.shape[2] != head_dim or q_THD.shape[1] % num_kv or k_cache_NKPD.shape != v_cache_NKPD.shape:
        raise ValueError(f"queries {tuple(q_THD.shape)} do not fit a cache of {tuple(k_cache_NKPD.shape)}")
    if not are_caches(k_cache_NKPD, v_cache_NKPD, q_THD.dtype) or not is_plain_meta(meta):
        return None
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    num_heads = q_THD.shape[1]
    caches = (k_cache_NKPD.data_ptr(), v_cache_NKPD.data_ptr())
    shapes = (q_THD.shape[0], num_heads, num_kv, head_dim, block_size, num_blocks, window or 0)
    out = (out_THD.data_ptr(), num_heads * head_dim)
    scalars = (scale, softcap or 0.0, code)
    check(lib.nl_attention(q_THD.data_ptr(), q_THD.stride(0), *caches, *out, *meta_pointers(meta), *shapes, *scalars))
    return out_THD


def is_plain_meta(meta: AttentionMeta) -> bool:
    """Tell whether the loops can read the meta's tensors as they are."""
    tensors = (meta.query_starts_B1, meta.context_lens_B, meta.block_tables_BN)
    return all(t.dtype == torch.int32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def meta_pointers(meta: AttentionMeta) -> tuple[int, int, int, int, int]:
    """Return pointers to starts, lengths and tables, then the tables' row stride and the number of sequences."""
    tables = meta.block_tables_BN
    pointers = (meta.query_starts_B1.data_ptr(), meta.context_lens_B.data_ptr(), tables.data_ptr())
    return (*pointers, tables.shape[1], meta.context_lens_B.shape[0])


def layer_norm(x_TM: Tensor, w_M: Tensor, b_M: Tensor, eps: float) -> Tensor | None:
    """Accept any row stride, weight and bias of x's dtype or float32."""
    lib, code, w_code = library(), CODES.get(x_TM.dtype), CODES.get(w_M.dtype)
    if lib is None or code is None or x_TM.dim() != 2 or not _has_plain_rows(x_TM, w_M, b_M):
        return None
    if w_code not in (code, 0) or b_M.dtype != w_M.dtype:
        return None
    y = torch.empty(x_TM.shape, dtype=x_TM.dtype)
    num_rows, dim = x_TM.shape
    norm = (w_M.data_ptr(), b_M.data_ptr(), w_code)
    lib.nl_layer_norm(x_TM.data_ptr(), x_TM.stride(0), *norm, y.data_ptr(), dim, num_rows, dim, eps, code)
    return y


def activate(x: Tensor, activation: str, is_gated: bool) -> Tensor | None:
    """Accept any row stride."""
    lib, code = library(), CODES.get(x.dtype)
    if lib is None or code is None or x.dim() != 2 or not _has_plain_rows(x):
        return None
    rows, dim = x.shape[0], x.shape[1] // 2 if is_gated else x.shape[1]
    y = torch.empty((rows, dim), dtype=x.dtype)
    lib.nl_activate(x.data_ptr(), x.stride(0), y.data_ptr(), rows, dim, is_gated, ACTIVATIONS[activation], code)
    return y


def linear(x_TM: Tensor, w_NM: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Tensor | None:
    """Accept any row stride of x, weights of its dtype that are contiguous or the transpose of such, output in that
    dtype or float32."""
    lib, code, out = library(), CODES.get(x_TM.dtype), out_dtype or x_TM.dtype
    is_turned = not w_NM.is_contiguous()
    if lib is None or code is None or x_TM.dim() != 2 or x_TM.device.type != "cpu" or x_TM.stride(-1) != 1:
        return None
    if is_turned and not w_NM.T.is_contiguous():
        return None
    if w_NM.dtype != x_TM.dtype or out not in (x_TM.dtype, torch.float32) or x_TM.shape[1] != w_NM.shape[1]:
        return None
    num_tokens, num_outputs = x_TM.shape[0], w_NM.shape[0]
    if code == 1 and num_tokens >= _AMX_LINEAR_FROM and out == x_TM.dtype and has_tile_units():
        return None
    bias = None
    if bias_N is not None:
        if bias_N.dtype != x_TM.dtype or not bias_N.is_contiguous():
            return None
        bias = bias_N.data_ptr()
    y = torch.empty((num_tokens, num_outputs), dtype=out)
    rows = (x_TM.data_ptr(), x_TM.stride(0), w_NM.data_ptr(), bias, y.data_ptr(), num_outputs)
    run = lib.nl_linear_columns if is_turned else lib.nl_linear
    run(*rows, num_tokens, num_outputs, x_TM.shape[1], code, CODES[out])
    return y


class LoraPart(ctypes.Structure):
    """`lora_part` of ops.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("a", "b", "gain", "shift")),
        *((name, c_long) for name in ("rank", "start", "end", "first_output", "num_outputs")),
    )


def lora_add_(y_TN: Tensor, x_TM: Tensor, segments: Sequence[LoraSegment]) -> bool:
    """Accept any row strides and y of x's dtype or float32; `b_NR` is read without a copy if it is the transpose of a
    contiguous [R, N]."""
    lib, code, y_code = library(), CODES.get(x_TM.dtype), CODES.get(y_TN.dtype)
    if lib is None or code is None or y_code not in (code, 0) or not _has_plain_rows(y_TN, x_TM):
        return False
    parts = (LoraPart * len(segments))()
    kept = []
    for part, segment in zip(parts, segments, strict=True):
        a, b = segment.a_RM.contiguous(), segment.b_NR.T.contiguous()
        if a.dtype != x_TM.dtype or b.dtype != x_TM.dtype or not 0 <= segment.start <= segment.end <= y_TN.shape[0]:
            return False
        kept += [a, b]
        part.a, part.b, part.rank = a.data_ptr(), b.data_ptr(), a.shape[0]
        for name, vector in (("gain", segment.gain_N), ("shift", segment.shift_N)):
            if vector is not None:
                kept.append(vector.float().contiguous())
                setattr(part, name, kept[-1].data_ptr())
        part.start, part.end, part.num_outputs = segment.start, segment.end, y_TN.shape[1]
    x, y = (x_TM.data_ptr(), x_TM.stride(0)), (y_TN.data_ptr(), y_TN.stride(0))
    lib.nl_lora(parts, len(segments), *x, x_TM.shape[1], *y, code, y_code)
    return True

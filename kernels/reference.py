"""Every op in plain torch: the specification that the compiled and Triton paths are tested against.

Arithmetic is float32 inside an op and rounds to the tensor's dtype once, at its end. Works on any device and for
float32, bfloat16 and float16; nothing here is fast.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nearline.kernels.types import AttentionMeta, LoraSegment


def rms_norm(x_TM: Tensor, w_M: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) · w over the last dim, in x's dtype (w may be float32)."""
    x = x_TM.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * w_M.float()).to(x_TM.dtype)


def add_rms_norm(x_TM: Tensor, residual_TM: Tensor, w_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual in place (rounded to its dtype) and return (rms_norm(residual), residual)."""
    residual_TM.copy_(residual_TM.float() + x_TM.float())
    return rms_norm(residual_TM, w_M, eps), residual_TM


def layer_norm(x_TM: Tensor, w_M: Tensor, b_M: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / deviation · w + b over the last dim, in x's dtype."""
    normed_TM = F.layer_norm(x_TM.float(), w_M.shape, w_M.float(), b_M.float(), eps)
    return normed_TM.to(x_TM.dtype)


def rope_(q_THD: Tensor, k_TKD: Tensor, positions_T: Tensor, cos_sin_SR: Tensor) -> None:
    """Rotate q and k in place, half-rotation layout: dim i pairs with dim i + R/2.

    Shapes: cos_sin_SR [positions, R] float32, its first R/2 columns cosines, the rest sines; dims beyond R stay.
    """
    half = cos_sin_SR.shape[1] // 2
    rows = cos_sin_SR[positions_T.long()].unsqueeze(1)
    cos, sin = rows[..., :half], rows[..., half:]
    for x in (q_THD, k_TKD):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = first * cos - second * sin, second * cos + first * sin
        x[..., :half].copy_(turned[0])
        x[..., half : 2 * half].copy_(turned[1])


def write_kv(k_TKD: Tensor, v_TKD: Tensor, k_cache_NKPD: Tensor, v_cache_NKPD: Tensor, slots_T: Tensor) -> None:
    """Store each token's key and value at its slot (block · P + offset); a negative slot stores nothing."""
    block_size = k_cache_NKPD.shape[2]
    kept = slots_T >= 0
    slots = slots_T[kept].long()
    blocks, offsets = slots // block_size, slots % block_size
    k_cache_NKPD[blocks, :, offsets] = k_TKD[kept].to(k_cache_NKPD.dtype)
    v_cache_NKPD[blocks, :, offsets] = v_TKD[kept].to(v_cache_NKPD.dtype)


def paged_attention(
    q_THD: Tensor,
    k_cache_NKPD: Tensor,
    v_cache_NKPD: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of the new tokens over each sequence's cached positions (their own included).

    A query at position t sees positions (t - window, t], all of them when `window` is None. With a softcap c every
    score s (already scaled) becomes c · tanh(s / c). Shapes: returns o_THD.
    """
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    starts = meta.query_starts_B1.tolist()
    for b, context_len in enumerate(meta.context_lens_B.tolist()):
        q_HQD = q_THD[starts[b] : starts[b + 1]].float().transpose(0, 1)
        num_new = q_HQD.shape[1]
        if num_new == 0:
            continue
        k_HCD = _gather(k_cache_NKPD, meta.block_tables_BN[b], context_len, q_HQD.shape[0])
        v_HCD = _gather(v_cache_NKPD, meta.block_tables_BN[b], context_len, q_HQD.shape[0])
        scores_HQC = torch.matmul(q_HQD, k_HCD.transpose(1, 2)) * scale
        if softcap is not None:
            scores_HQC = softcap * torch.tanh(scores_HQC / softcap)
        query_at = torch.arange(context_len - num_new, context_len, device=q_THD.device).unsqueeze(1)
        key_at = torch.arange(context_len, device=q_THD.device).unsqueeze(0)
        hidden = key_at > query_at
        if window is not None:
            hidden |= key_at <= query_at - window
        weights_HQC = scores_HQC.masked_fill(hidden, float("-inf")).softmax(-1)
        out_THD[starts[b] : starts[b + 1]] = torch.matmul(weights_HQC, v_HCD).transpose(0, 1).to(q_THD.dtype)
    return out_THD


def _gather(cache_NKPD: Tensor, table_N: Tensor, context_len: int, num_heads: int) -> Tensor:
    """Return a sequence's cached positions as float32 [H, context, D], kv heads repeated for their query heads."""
    _, num_kv, block_size, head_dim = cache_NKPD.shape
    num_blocks = -(-context_len // block_size)
    blocks_NKPD = cache_NKPD[table_N[:num_blocks].long()].float()
    flat_KCD = blocks_NKPD.transpose(0, 1).reshape(num_kv, num_blocks * block_size, head_dim)[:, :context_len]
    return flat_KCD.repeat_interleave(num_heads // num_kv, dim=0)


def activate(x: Tensor, activation: str, is_gated: bool = True) -> Tensor:
    """Return act(gate) · up of [gate | up] along the last dim, or act of it all where there is no gate.

    Shapes: [T, 2F] → [T, F], or [T, F] → [T, F]. `activation` is transformers' name of it, a key of ACTIVATIONS.
    """
    function = ACTIVATIONS[activation]
    if not is_gated:
        return function(x.float()).to(x.dtype)
    gate, up = x.float().chunk(2, dim=-1)
    return (function(gate) * up).to(x.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "relu": F.relu, "gelu": F.gelu, "gelu_new": _gelu_tanh, "gelu_pytorch_tanh": _gelu_tanh,
}  # fmt: skip


def linear(x_TM: Tensor, w_NM: Tensor, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return x · wᵀ + bias in x's dtype, or in `out_dtype` (float32 logits of a bfloat16 model)."""
    if out_dtype is None or out_dtype == x_TM.dtype:
        return F.linear(x_TM, w_NM, bias_N)
    return F.linear(x_TM.to(out_dtype), w_NM.to(out_dtype), None if bias_N is None else bias_N.to(out_dtype))


def embedding(ids_T: Tensor, table_VM: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of a table in `dtype`. Shapes: [T] → [T, M]."""
    return F.embedding(ids_T, table_VM).to(dtype)


def sample(logits_SV: Tensor, wishes_5S: Tensor) -> Tensor:
    """Choose a token per row: the point of the cumulative distribution that `point` of the whole says.

    Filters, each on what the one before left: temperature, min_p (relative to the best), top_k (ties with the k-th
    stay), top_p (the fewest of the heaviest that reach it; of equals the first). Kept tokens stand in vocabulary order.
    Shapes: logits fp32 [S, V]; wishes fp64 [5, S], rows point in [0, 1), 1 / temperature (0: the best token, the
    lowest of equals), top_k (0: all), top_p (1: all), min_p. Returns [S] int64, -1 where a row has NaN or infinity
    or nothing but -infinity.
    """
    return torch.stack([_sample_row(row_V, wish_5) for row_V, wish_5 in zip(logits_SV, wishes_5S.T, strict=True)])


def _sample_row(logits_V: Tensor, wish_5: Tensor) -> Tensor:
    best = logits_V.max()
    if not torch.isfinite(best):
        return torch.full((), -1, device=logits_V.device)
    point, inverse, top_k, top_p, min_p = wish_5.tolist()
    if not inverse:
        return (logits_V == best).int().argmax()
    weights_V = ((logits_V - best) * torch.tensor(inverse, dtype=torch.float32)).exp()
    least = torch.tensor(min_p, dtype=torch.float32, device=logits_V.device)
    if 0 < top_k < len(weights_V):
        least = torch.maximum(least, weights_V.topk(int(top_k)).values[-1])
    kept_V = weights_V >= least
    if top_p < 1.0:
        heaviest, order = torch.where(kept_V, weights_V, 0.0).double().sort(descending=True, stable=True)
        sums = heaviest.cumsum(0)
        num_kept = int((sums < top_p * sums[-1]).sum()) + 1
        kept_V &= torch.zeros_like(kept_V).index_fill_(0, order[:num_kept], True)
    sums = torch.where(kept_V, weights_V, 0.0).double().cumsum(0)
    past_V = kept_V & (weights_V > 0) & (sums > point * sums[-1])
    return past_V.int().argmax() if bool(past_V.any()) else (kept_V & (weights_V > 0)).nonzero()[-1, 0]


def lora_add_(y_TN: Tensor, x_TM: Tensor, segments: Sequence[LoraSegment]) -> None:
    """Add each segment's low-rank product to its rows of y in place; y may be a column slice of a wider tensor."""
    for segment in segments:
        rows = slice(segment.start, segment.end)
        shrunk_TR = x_TM[rows].float() @ segment.a_RM.float().T
        base_TN = y_TN[rows].float()
        if segment.gain_N is not None:
            base_TN = base_TN * segment.gain_N
        if segment.shift_N is not None:
            base_TN = base_TN + segment.shift_N
        y_TN[rows] = (base_TN + shrunk_TR @ segment.b_NR.float().T).to(y_TN.dtype)

"""Triton product with weights of 8 and 4 bits, decoded on the way: memory gives up codes, never plain weights."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
# Device code has no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearline.kernels.quant import LANES, QuantMatrix

_OUTPUTS = 64
_IS_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _quant_kernel(
    x, codes, scales, offsets, bias, y, x_stride, y_stride, num_tokens, num_outputs, dim, code_stride, scale_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Codes of a block of sixteen rows: [run][row][pair][step], see quant.py; a run is 4 columns, or 8 of 4 bits."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_output = token < num_tokens, output < num_outputs
    block, lane = (output // LANES).to(tl.int64), output % LANES
    column = tl.arange(0, GROUP)
    run_columns: tl.constexpr = 32 // BITS
    step = column % run_columns // 2
    place = column // run_columns * (4 * LANES) + column % 2 * 2
    if BITS == 8:
        place += step
    else:
        place += step // 2
    code_at = codes + block[:, None] * code_stride + lane[:, None] * 4 + place[None, :]
    scale_at = block * scale_stride + lane
    rows = x + token.to(tl.int64)[:, None] * x_stride
    sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for group in range(0, (dim + GROUP - 1) // GROUP):
        at = group * GROUP + column
        inputs = tl.load(rows + at[None, :], mask=is_token[:, None] & (at[None, :] < dim), other=0.0)
        code = tl.load(code_at + group * (GROUP * LANES * BITS // 8), mask=is_output[:, None], other=0).to(tl.int32)
        scale = tl.load(scales + scale_at + group * LANES, mask=is_output, other=0.0).to(tl.float32)
        if BITS == 8:
            weights = (code - 128).to(tl.float32) * scale[:, None]
        else:
            offset = tl.load(offsets + scale_at + group * LANES, mask=is_output, other=0.0).to(tl.float32)
            nibble = (code >> (step % 2 * 4)[None, :]) & 15
            weights = nibble.to(tl.float32) * scale[:, None] + offset[:, None]
        weights = weights.to(x.dtype.element_ty)
        if UPCAST:
            inputs = inputs.to(tl.float32)
            weights = weights.to(tl.float32)
        sums += tl.dot(inputs, tl.trans(weights), input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = y + token.to(tl.int64)[:, None] * y_stride + output[None, :]
    tl.store(to, sums.to(y.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


def quant_linear(x_TM: Tensor, w_NM: QuantMatrix, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """Accept any row stride of x."""
    (num_tokens, dim), num_outputs = x_TM.shape, w_NM.shape[0]
    y_TN = torch.empty((num_tokens, num_outputs), dtype=out_dtype or x_TM.dtype, device=x_TM.device)
    if num_tokens:
        tokens = 16 if num_tokens <= 16 else 64
        grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(num_outputs, _OUTPUTS))
        offsets, bias = w_NM.scales if w_NM.offsets is None else w_NM.offsets, x_TM if bias_N is None else bias_N
        _quant_kernel[grid](
            x_TM, w_NM.codes, w_NM.scales, offsets, bias, y_TN, x_TM.stride(0), num_outputs,
            num_tokens, num_outputs, dim, w_NM.codes.shape[1], w_NM.scales.shape[1], w_NM.bits, w_NM.group, LANES,
            tokens, _OUTPUTS, bias_N is not None, _IS_INTERPRETED or x_TM.dtype == torch.float32,
        )  # fmt: skip
    return y_TN

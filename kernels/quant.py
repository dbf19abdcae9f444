"""Weights of 8 and 4 bits: what such a matrix is, what it stands for in plain torch, and its compiled product.

Codes lie as the compiled loops read them: rows by sixteen side by side, four bytes of neighbouring columns each (see
csrc/quant.c). A weight is scale · (code - 128) at 8 bits and scale · code + offset at 4.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearline.kernels import native

LANES = 16
GROUPS = {8: 64, 4: 32}
"""bits → columns of a row that share a scale."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantMatrix:
    """A matrix w_NM in codes. With b blocks of sixteen rows and g groups of columns:

    Shapes: codes uint8 [b, bytes], scales bfloat16 [b, 16·g] as [b][g][16]; offsets the same, at 4 bits only.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        """Raises ValueError for tensors that are not this shape's: the loops trust them."""
        rows, columns = self.shape
        num_blocks, num_groups = -(-rows // LANES), -(-columns // self.group)
        code_bytes = num_groups * self.group * LANES * self.bits // 8
        vectors = [v for v in (self.scales, self.offsets) if v is not None]
        fits = self.codes.shape == (num_blocks, code_bytes) and self.codes.dtype == torch.uint8
        fits &= all(v.shape == (num_blocks, num_groups * LANES) and v.dtype == torch.bfloat16 for v in vectors)
        if not fits or not all(t.is_contiguous() for t in (self.codes, *vectors)):
            found = [f"{t.dtype}{list(t.shape)}" for t in (self.codes, *vectors)]
            raise ValueError(f"a matrix of {list(self.shape)} in {self.bits} bits is not {', '.join(found)}")

    @property
    def bits(self) -> int:
        return 8 if self.offsets is None else 4

    @property
    def group(self) -> int:
        return GROUPS[self.bits]

    @property
    def pointers(self) -> tuple[int, int, int | None]:
        """Addresses of codes, scales and offsets."""
        return self.codes.data_ptr(), self.scales.data_ptr(), None if self.offsets is None else self.offsets.data_ptr()

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix the codes stand for, each weight rounded once to `dtype`."""
        return self._values(self.codes, self.scales, self.offsets)[: self.shape[0]].to(dtype)

    def rows(self, rows_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Return some rows of `dequantised(dtype)`, decoding these alone. Raises IndexError for one outside."""
        lib, code, (num_rows, dim) = native.library(), native.CODES.get(dtype), self.shape
        if lib is not None and code is not None and self.codes.device.type == "cpu":
            y_TM = torch.empty((rows_T.shape[0], dim), dtype=dtype)
            ids = rows_T.to(torch.int64).contiguous()
            out = (ids.data_ptr(), y_TM.data_ptr(), dim, ids.shape[0])
            native.check(lib.nl_quant_rows(*self.pointers, *out, num_rows, dim, code, self.bits))
            return y_TM
        blocks, vectors = rows_T // LANES, (self.scales, self.offsets)
        scales, offsets = (None if v is None else v[blocks] for v in vectors)
        assert scales is not None
        values = self._values(self.codes[blocks], scales, offsets).view(-1, LANES, dim)
        return values[torch.arange(len(rows_T), device=rows_T.device), rows_T % LANES].to(dtype)

    def _values(self, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
        """Shapes: [blocks, …] → float32 [16 · blocks, columns]."""
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1)
        steps = 16 // self.bits
        by_run = codes.view(len(scales), -1, LANES, 2, steps).permute(0, 2, 1, 4, 3)
        grouped = by_run.reshape(len(scales), LANES, -1, self.group).float()
        scale, offset = (
            None if v is None else v.float().view(len(v), -1, LANES).transpose(1, 2)[..., None]
            for v in (scales, offsets)
        )
        assert scale is not None
        values = (grouped - 128) * scale if offset is None else grouped * scale + offset
        return values.reshape(len(scales) * LANES, -1)[:, : self.shape[1]]


def quant_linear(
    x_TM: Tensor, w_NM: QuantMatrix, bias_N: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor | None:
    """Run the compiled product; None where there is none. Accept what native.linear accepts of x, bias and output."""
    lib, code, out = native.library(), native.CODES.get(x_TM.dtype), out_dtype or x_TM.dtype
    if lib is None or code is None or x_TM.dim() != 2 or x_TM.device.type != "cpu" or x_TM.stride(-1) != 1:
        return None
    num_outputs, dim = w_NM.shape
    if x_TM.shape[1] != dim:
        raise ValueError(f"inputs {list(x_TM.shape)} do not fit weights {list(w_NM.shape)}")
    if out not in (x_TM.dtype, torch.float32) or w_NM.codes.device.type != "cpu":
        return None
    if bias_N is not None and (bias_N.dtype != x_TM.dtype or not bias_N.is_contiguous()):
        return None
    y = torch.empty((x_TM.shape[0], num_outputs), dtype=out)
    bias = None if bias_N is None else bias_N.data_ptr()
    rows = (x_TM.data_ptr(), x_TM.stride(0), *w_NM.pointers, bias, y.data_ptr(), num_outputs)
    lib.nl_quant_linear(*rows, x_TM.shape[0], num_outputs, dim, code, native.CODES[out], w_NM.bits)
    return y

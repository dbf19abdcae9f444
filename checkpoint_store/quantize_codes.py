"""Matrices as codes of 8 or 4 bits, and back: the arithmetic of quantisation. Pure.

`protocol.quantization` says how codes, scales and offsets lie. Scales are rounded to bfloat16 before codes are chosen,
so their rounding costs nothing.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nearline.checkpoint_store.numbers import Bits16, Floats, from_bfloat16, to_bfloat16
from nearline.protocol import QuantFormat
from nearline.protocol.quantization import LANES

_REFINEMENTS = 2
"""Rounds in which scale and offset are fitted to the codes and the codes chosen anew."""
Codes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Whole blocks of sixteen rows, coded. Shapes: those of `QuantFormat` for these rows."""

    codes: Codes
    scales: Bits16
    offsets: Bits16 | None
    squared_error: float
    """Σ (decoded - original)²."""


def encode(values: Floats, wanted: QuantFormat) -> CodedRows:
    """Code rows; the last block may be short of rows and the last group short of columns: zeros fill them."""
    rows, columns = values.shape
    num_blocks, num_groups = wanted.num_blocks(rows), wanted.num_groups(columns)
    padding = (0, num_blocks * LANES - rows), (0, num_groups * wanted.group - columns)
    padded = np.pad(values, padding) if any(width for _, width in padding) else values
    groups = padded.reshape(-1, wanted.group)
    codes, scales, offsets = _affine(groups) if wanted.has_offsets else _symmetric(groups)
    error = _decoded(codes, scales, offsets) - groups
    shape = num_blocks, LANES, num_groups
    return CodedRows(
        _packed(codes.astype(np.uint8).reshape(num_blocks, LANES, -1), wanted),
        to_bfloat16(scales).reshape(shape).swapaxes(1, 2).reshape(num_blocks, -1),
        None if offsets is None else to_bfloat16(offsets).reshape(shape).swapaxes(1, 2).reshape(num_blocks, -1),
        float(np.square(error, dtype=np.float64).sum()),
    )


def decode(coded: tuple[Codes, Bits16, Bits16 | None], wanted: QuantFormat, shape: tuple[int, int]) -> Floats:
    """Turn codes, scales and offsets back into a matrix of this shape."""
    codes, scales, offsets = coded
    num_blocks, num_groups = wanted.num_blocks(shape[0]), wanted.num_groups(shape[1])

    def by_group(vectors: Bits16) -> Floats:
        return from_bfloat16(vectors).reshape(num_blocks, num_groups, LANES).swapaxes(1, 2).reshape(-1, 1)

    unpacked = _unpacked(codes.reshape(num_blocks, -1), wanted).reshape(-1, wanted.group).astype(np.float32)
    rows = _decoded(unpacked, by_group(scales), None if offsets is None else by_group(offsets))
    return rows.reshape(num_blocks * LANES, -1)[: shape[0], : shape[1]]


def _decoded(codes: Floats, scales: Floats, offsets: Floats | None) -> Floats:
    return (codes - np.float32(128)) * scales if offsets is None else codes * scales + offsets


def _symmetric(groups: Floats) -> tuple[Floats, Floats, None]:
    scales = _rounded(np.abs(groups).max(axis=1, keepdims=True) / np.float32(127))
    scales[scales == 0] = 1
    return np.clip(np.rint(groups / scales), -128, 127) + np.float32(128), scales, None


def _affine(groups: Floats) -> tuple[Floats, Floats, Floats]:
    """Start from the extremes, then fit scale and offset to the codes by least squares; per group the best is kept."""
    low = groups.min(axis=1, keepdims=True)
    scales, offsets = _rounded((groups.max(axis=1, keepdims=True) - low) / np.float32(15)), _rounded(low)
    scales[scales == 0] = 1
    codes = _nearest(groups, scales, offsets)
    error = np.square(codes * scales + offsets - groups).sum(axis=1, keepdims=True)
    for _ in range(_REFINEMENTS):
        tried = _fitted(groups, codes)
        tried_codes = _nearest(groups, *tried)
        tried_error = np.square(tried_codes * tried[0] + tried[1] - groups).sum(axis=1, keepdims=True)
        is_better = tried_error < error
        scales, offsets = np.where(is_better, tried[0], scales), np.where(is_better, tried[1], offsets)
        codes, error = np.where(is_better, tried_codes, codes), np.where(is_better, tried_error, error)
    return codes, scales, offsets


def _nearest(groups: Floats, scales: Floats, offsets: Floats) -> Floats:
    nearest: Floats = np.clip(np.rint((groups - offsets) / scales), 0, 15)
    return nearest


def _fitted(groups: Floats, codes: Floats) -> tuple[Floats, Floats]:
    """The line through (code, weight) of each group with the least squared error; scale 1 where all codes agree."""
    count = np.float32(groups.shape[1])
    mean_code, mean = codes.sum(axis=1, keepdims=True) / count, groups.sum(axis=1, keepdims=True) / count
    spread = np.square(codes).sum(axis=1, keepdims=True) - count * np.square(mean_code)
    joint = (codes * groups).sum(axis=1, keepdims=True) - count * mean_code * mean
    scales = _rounded(np.divide(joint, spread, out=np.ones_like(joint), where=spread > 0))
    scales[scales == 0] = 1
    return scales, _rounded(mean - scales * mean_code)


def _rounded(values: Floats) -> Floats:
    return from_bfloat16(to_bfloat16(values))


def _packed(codes: Codes, wanted: QuantFormat) -> Codes:
    """Shapes: [blocks, 16, columns] → [blocks, bytes]."""
    num_blocks, steps = codes.shape[0], 16 // wanted.bits
    by_run = codes.reshape(num_blocks, LANES, -1, steps, 2).transpose(0, 2, 1, 4, 3)
    if wanted.bits == 4:
        by_run = by_run[..., 0::2] | (by_run[..., 1::2] << np.uint8(4))
    return np.ascontiguousarray(by_run).reshape(num_blocks, -1)


def _unpacked(codes: Codes, wanted: QuantFormat) -> Codes:
    """Shapes: [blocks, bytes] → [blocks, 16, columns]."""
    num_blocks, steps = codes.shape[0], 16 // wanted.bits
    if wanted.bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1)
    by_run = codes.reshape(num_blocks, -1, LANES, 2, steps).transpose(0, 2, 1, 4, 3)
    return by_run.reshape(num_blocks, LANES, -1)

"""Rotary frequencies of a DecoderSpec and the table of cosines and sines they make, always computed in fp32."""

import math

import torch
from torch import Tensor

from nearline.protocol import DecoderSpec, RopeScaling

INITIAL_POSITIONS = 2048


def inverse_frequencies(spec: DecoderSpec, is_sliding: bool = False) -> tuple[Tensor, float]:
    """Compute the inverse frequency of each pair of turned head dims and the factor on cosines and sines.

    `is_sliding`: those of sliding layers. Shapes: [R/2] for R turned dims, D in most families. "dynamic" stretches
    only beyond `max_context_tokens`, where no sequence goes, so it is the default.
    Source: transformers `modeling_rope_utils`, same formulas in the same precision.
    """
    dim, scaling = spec.rotary_dim or spec.head_dim, spec.rope_scaling
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if is_sliding and spec.sliding_rope_theta is not None:
        return 1.0 / (spec.sliding_rope_theta**exponents), 1.0
    plain = 1.0 / (spec.rope_theta**exponents)
    if scaling is None or scaling.kind == "dynamic":
        return plain, 1.0
    if scaling.kind == "longrope":
        divisors = torch.tensor(scaling.divisors, dtype=torch.float32)
        return 1.0 / (divisors * spec.rope_theta**exponents), scaling.value("attention_factor", 1.0)
    if scaling.kind == "linear":
        return plain / scaling.value("factor", 1.0), 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, spec, scaling), 1.0
    return _yarn(spec.rope_theta**exponents, spec, scaling)


class RopeTable:
    """cos ‖ sin per position, [S, R] for R turned dims in fp32 (first half cosines). Grows to the positions in use."""

    def __init__(self, spec: DecoderSpec, device: torch.device, is_sliding: bool = False) -> None:
        inverse, self._factor = inverse_frequencies(spec, is_sliding)
        self._inverse = inverse.to(device)
        self.table_SD = self._table(min(INITIAL_POSITIONS, spec.max_context_tokens))

    def reserve(self, num_positions: int) -> None:
        """Let the table cover at least `num_positions` positions."""
        covered = self.table_SD.shape[0]
        if num_positions > covered:
            self.table_SD = self._table(max(num_positions, 2 * covered))

    def _table(self, num_positions: int) -> Tensor:
        positions = torch.arange(num_positions, dtype=torch.float32, device=self._inverse.device)
        angles = positions[:, None] * self._inverse
        return torch.cat((angles.cos() * self._factor, angles.sin() * self._factor), dim=-1)


def _llama3(plain: Tensor, spec: DecoderSpec, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended."""
    factor = scaling.value("factor", 8.0)
    low, high = scaling.value("low_freq_factor", 1.0), scaling.value("high_freq_factor", 4.0)
    original = scaling.value("original_max_position_embeddings", spec.max_context_tokens)
    wavelength = 2 * math.pi / plain
    is_long, is_short = wavelength > original / low, wavelength < original / high
    stretched = torch.where(is_long, plain / factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    return torch.where(~is_long & ~is_short, blended, stretched)


def _yarn(wavelengths: Tensor, spec: DecoderSpec, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Interpolate slow dimensions, keep fast ones, ramp between; cosines and sines grow with log(factor)."""
    factor = scaling.value("factor", 1.0)
    original = scaling.value("original_max_position_embeddings", spec.max_context_tokens)
    dim, base = spec.rotary_dim or spec.head_dim, spec.rope_theta

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension_of(scaling.value("beta_fast", 0.0) or 32.0)
    high = dimension_of(scaling.value("beta_slow", 0.0) or 1.0)
    if scaling.value("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inverse = (1.0 / (factor * wavelengths)) * ramp + (1.0 / wavelengths) * (1 - ramp)
    return inverse, _yarn_factor(factor, scaling)


def _yarn_factor(factor: float, scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = scaling.value("attention_factor", 0.0)
    if given:
        return given
    top, bottom = scaling.value("mscale", 0.0), scaling.value("mscale_all_dim", 0.0)
    return mscale(top) / mscale(bottom) if top and bottom else mscale(1.0)

"""Every Triton kernel against the reference over a grid of shapes, on a device or interpreted: part of gpu_check."""

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nearline.kernels import AttentionMeta, LoraSegment, QuantMatrix, reference
from nearline.kernels.quant import GROUPS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STEP = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
_NOISE = {torch.float32: 2e-5, torch.bfloat16: 2e-3, torch.float16: 5e-4}
_ATTENTION_NOISE = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Probabilities are rounded to the dtype before they meet the values, as on every fast attention."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `is_met` is None where nothing was aimed at, or nothing could be measured."""

    part: str
    what: str
    measured: str
    aim: str = ""
    is_met: bool | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where the cases run and how large they are."""

    device: str
    is_small: bool
    triton: ModuleType

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape).to(self.device, dtype)


Case = Callable[[Place, torch.dtype], Iterator[float]]
"""Yields, shape by shape, the worst error as a share of what is allowed."""


def check_kernels(device: str, is_small: bool) -> list[Finding]:
    """Run every case in every dtype; one that raises is a finding too."""
    place = Place(device, is_small, importlib.import_module("nearline.kernels.triton_path"))
    findings = []
    for (name, case), dtype in itertools.product(CASES.items(), DTYPES):
        torch.manual_seed(0)
        what = f"{name}, {str(dtype).removeprefix('torch.')}"
        try:
            worst = max(case(place, dtype))
            findings.append(Finding("kernels", what, f"{worst:.2f} of the allowed error", "≤ 1", worst <= 1.0))
        except Exception as error:  # the other kernels are still worth knowing
            findings.append(Finding("kernels", what, f"{type(error).__name__}: {str(error)[:200]}", "≤ 1", False))
    return findings


def share(result: Tensor, truth: Tensor, noise: float) -> float:
    """Worst error as a share of one rounding of the result's dtype plus `noise`."""
    error = (result.float() - truth.float()).abs()
    worst = (error / (_STEP[result.dtype] * truth.float().abs() + noise)).max() if error.numel() else torch.zeros(())
    return float("inf") if not bool(worst.isfinite()) else float(worst)


def _norms(place: Place, dtype: torch.dtype) -> Iterator[float]:
    for rows, dim in [(3, 97)] if place.is_small else [(1, 576), (7, 4096), (130, 5120), (2, 16384)]:
        x, residual = place.random(rows, dim, dtype=dtype), place.random(rows, dim, dtype=dtype)
        w, b, noise = place.random(dim), place.random(dim), _NOISE[dtype]
        yield share(place.triton.rms_norm(x, w, 1e-5), reference.rms_norm(x.float(), w, 1e-5), noise)
        yield share(place.triton.layer_norm(x, w, b, 1e-5), reference.layer_norm(x.float(), w, b, 1e-5), noise)
        total = x.float() + residual.float()
        normed = place.triton.rms_norm(x, w, 1e-5, residual)
        yield share(residual, total, noise)
        yield share(normed, reference.rms_norm(residual.float(), w, 1e-5), noise)


def _activations(place: Place, dtype: torch.dtype) -> Iterator[float]:
    for rows, dim in [(3, 74)] if place.is_small else [(1, 3072), (65, 28672)]:
        x = place.random(rows, dim, dtype=dtype) * 4
        for name, is_gated in itertools.product(reference.ACTIVATIONS, (True, False)):
            result = place.triton.activate(x, name, is_gated)
            yield share(result, reference.activate(x.float(), name, is_gated), _NOISE[dtype])


def _rope_and_write(place: Place, dtype: torch.dtype) -> Iterator[float]:
    sizes = [(3, 2, 1, 24, 16)] if place.is_small else [(1, 32, 8, 128, 128), (300, 9, 3, 64, 64), (40, 40, 10, 96, 72)]
    for tokens, heads, kv_heads, dim, rotated in sizes:
        width = (heads + 2 * kv_heads) * dim
        ours = place.random(tokens, width, dtype=dtype)
        theirs = ours.float()
        table = torch.randn(64, rotated).to(place.device)
        positions = torch.randint(0, 64, (tokens,), dtype=torch.int32, device=place.device)
        slots = torch.randperm(64 * 16)[:tokens].to(place.device, torch.int32)
        slots[0] = -1
        caches = torch.zeros(2, 64, kv_heads, 16, dim, dtype=dtype, device=place.device)
        exact = caches.float()

        def heads_of(rows: Tensor, h: int = heads, k: int = kv_heads, d: int = dim) -> Iterator[Tensor]:
            parts = torch.split(rows, [h * d, k * d, k * d], dim=1)
            return (part.view(len(rows), -1, d) for part in parts)

        place.triton.rope_write_(*heads_of(ours), (positions, table), (caches[0], caches[1]), slots)
        q, k, v = heads_of(theirs)
        reference.rope_(q, k, positions, table)
        reference.write_kv(k, v, exact[0], exact[1], slots)
        yield share(ours, theirs, _NOISE[dtype])
        yield share(caches, exact, _NOISE[dtype])


def paged(place: Place, lengths: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype) -> Any:
    """Make queries, caches and meta of (new tokens, context) per sequence; blocks lie scattered."""
    num_heads, num_kv, dim = heads
    counts = [-(-context // 16) for _, context in lengths]
    blocks = torch.split(torch.randperm(sum(counts) + 3)[: sum(counts)], counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True).to(place.device, torch.int32)
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).to(place.device, torch.int32)
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32, device=place.device)
    caches = place.random(2, sum(counts) + 3, num_kv, 16, dim, dtype=dtype)
    q_THD = place.random(int(starts[-1]), num_heads, dim, dtype=dtype)
    return q_THD, caches[0], caches[1], AttentionMeta(starts, contexts, tables, max(new for new, _ in lengths))


def _attention(place: Place, dtype: torch.dtype) -> Iterator[float]:
    small = [((4, 2, 24), [(1, 1100), (1, 3)]), ((3, 1, 16), [(9, 30), (1, 5)])]
    large = [
        ((32, 8, 128), [(1, context) for context in (1, 17, 511, 513, 4000, 16000)]),
        ((32, 8, 128), [(300, 300), (1, 900), (64, 2000)]),
        ((8, 4, 256), [(1, 3000), (40, 100)]),
        ((9, 3, 64), [(130, 1030), (1, 1)]),
        ((40, 40, 80), [(5, 700), (1, 33)]),
    ]
    for heads, lengths in small if place.is_small else large:
        q, k, v, meta = paged(place, lengths, heads, dtype)
        for window, softcap in ((None, None), (100, None), (None, 3.0)):
            result = place.triton.paged_attention(q, k, v, meta, heads[2] ** -0.5, window, softcap)
            exact = (q.float(), k.float(), v.float(), meta, heads[2] ** -0.5, window, softcap)
            yield share(result, reference.paged_attention(*exact), _ATTENTION_NOISE[dtype])


def _adapters(place: Place, dtype: torch.dtype) -> Iterator[float]:
    rows, dim, outputs = (23, 72, 137) if place.is_small else (200, 4096, 6144)
    x, y = place.random(rows, dim, dtype=dtype), place.random(rows, outputs + 9, dtype=dtype)
    exact, segments = y.float(), []
    for start, end, rank in ((1, 2, 8), (4, rows - 4, 16), (rows - 4, rows, 64 if not place.is_small else 17)):
        a, b = place.random(rank, dim, dtype=dtype) * dim**-0.5, place.random(outputs, rank, dtype=dtype)
        segments.append(LoraSegment(start, end, a, b))
    reference.lora_add_(exact[:, 9:], x.float(), segments)
    place.triton.lora_add_(y[:, 9:], x, segments)
    yield share(y, exact, 10 * _NOISE[dtype])


def _quantised(place: Place, dtype: torch.dtype) -> Iterator[float]:
    """The interpreter cuts decoded weights off where a device rounds them: more noise is allowed there."""
    sizes = [(3, 70, 200)] if place.is_small else [(1, 6144, 4096), (30, 4096, 14336), (200, 1000, 520)]
    for (tokens, rows, dim), bits in itertools.product(sizes, (8, 4)):
        blocks, groups = -(-rows // 16), -(-dim // GROUPS[bits])
        codes = torch.randint(0, 256, (blocks, groups * GROUPS[bits] * 2 * bits), dtype=torch.uint8)
        scales, offsets = place.random(2, blocks, groups * 16, dtype=torch.bfloat16) * dim**-0.5 / 64
        matrix = QuantMatrix(codes.to(place.device), scales, offsets if bits == 4 else None, (rows, dim))
        x = place.random(tokens, dim, dtype=dtype)
        exact = x.float() @ matrix.dequantised(dtype).float().T
        yield share(
            place.triton.quant_linear(x, matrix, None, None), exact, (10 if place.is_small else 1) * _NOISE[dtype]
        )


def _sampling(place: Place, dtype: torch.dtype) -> Iterator[float]:
    """Share of rows where another token is chosen; a float32 exponential may round otherwise once in very many rows."""
    if dtype != torch.float32:
        yield 0.0
        return
    rows, vocab = (10, 283) if place.is_small else (64, 128_256)
    logits = place.random(rows, vocab) * 3
    wishes = torch.rand(5, rows, dtype=torch.float64)
    wishes[1] += 0.5
    wishes[1, 0], wishes[2], wishes[4] = 0.0, (wishes[2] * 50).floor(), wishes[4] * 0.01
    wishes[3, ::2], wishes[4, ::3], wishes[2, ::4] = 1.0, 0.0, 0.0
    wishes = wishes.to(place.device)
    differing = (place.triton.sample(logits, wishes) != reference.sample(logits, wishes)).sum()
    yield float("inf") if place.is_small and differing else float(differing)


CASES: dict[str, Case] = {
    "RMS and layer norms": _norms,
    "activations": _activations,
    "rope and KV write": _rope_and_write,
    "paged attention": _attention,
    "LoRA of many adapters": _adapters,
    "int8 and int4 products": _quantised,
    "sampling": _sampling,
}

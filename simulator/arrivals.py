"""Synthetic traffic: when requests come, for which model, how long. Each choice has a random stream of its own. Pure.

The streams are independent, so changing the rate changes no length, and changing the lengths moves no arrival.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from math import sqrt
from typing import Any

import numpy as np

from nearline.protocol import ModelId, Seconds, Slo, SloClass, TenantId

_MAX_PROMPT_TOKENS, _MAX_OUTPUT_TOKENS = 4096, 1024
_SPREAD = 0.8
_AT_ONCE = 2048
INTERACTIVE, BATCH_1M = Slo(SloClass.INTERACTIVE), Slo(SloClass.BATCH_1M)


@dataclass(frozen=True, slots=True)
class Arrival:
    at: Seconds
    model_id: ModelId
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: TenantId = TenantId("default")
    slo: Slo = INTERACTIVE
    prefix_hash: int = 0
    max_tokens: int = 0
    """What the caller allows; 0: a common limit. The true length is unknown to the core, as it is live."""


class Shape(StrEnum):
    """How the rate moves: steady; on and off by half periods; or rising from nothing to twice the mean."""

    STEADY = "steady"
    ON_OFF = "on-off"
    RAMP = "ramp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Gamma gaps of mean 1/rate and coefficient of variation `cv` (1: Poisson); models by a Zipf law of exponent `zipf`
    (0: uniform); prompt and output lengths log-normal around their medians; tenants evenly; a part `batch_part` of the
    requests is of class batch-1m. The mean rate is the same for every shape."""

    num_models: int
    rate_per_s: float
    seconds: Seconds
    seed: int
    cv: float = 1.0
    zipf: float = 1.0
    prompt_median: int = 200
    output_median: int = 120
    shape: Shape = Shape.STEADY
    period_s: Seconds = 60.0
    num_tenants: int = 1
    batch_part: float = 0.0
    models: tuple[ModelId, ...] = field(default=())


def model_ids(num_models: int) -> list[ModelId]:
    width = len(str(num_models))
    return [ModelId(f"m{index:0{width}d}") for index in range(1, num_models + 1)]


def arrivals(traffic: Traffic) -> Iterator[Arrival]:
    """Yield the arrivals of a run in order of time."""
    gaps, models, prompts, outputs, tenants, classes = (
        np.random.default_rng(child) for child in np.random.SeedSequence(traffic.seed).spawn(6)
    )
    names = list(traffic.models) or model_ids(traffic.num_models)
    weights = list(accumulate(1.0 / (rank + 1) ** traffic.zipf for rank in range(len(names))))
    shape, total = 1.0 / traffic.cv**2, weights[-1]
    callers = [TenantId(f"t{n}") for n in range(traffic.num_tenants)]
    is_steady, end_s, batch_part = traffic.shape is Shape.STEADY, traffic.seconds, traffic.batch_part
    columns = (
        _stream(lambda: gaps.gamma(shape, 1.0 / (traffic.rate_per_s * shape), _AT_ONCE)),
        _stream(lambda: np.searchsorted(weights, models.random(_AT_ONCE) * total, "right")),
        _stream(lambda: _lengths(prompts, traffic.prompt_median, _MAX_PROMPT_TOKENS)),
        _stream(lambda: _lengths(outputs, traffic.output_median, _MAX_OUTPUT_TOKENS)),
        _stream(lambda: tenants.integers(traffic.num_tenants, size=_AT_ONCE)),
        _stream(lambda: classes.random(_AT_ONCE) < batch_part),
    )
    steady = 0.0
    for gap, model, prompt, output, tenant, is_batch in zip(*columns, strict=False):
        steady += gap
        at = steady if is_steady else _warped(steady, traffic)
        if at >= end_s:
            return
        yield Arrival(at, names[model], prompt, output, callers[tenant], BATCH_1M if is_batch else INTERACTIVE)


def _stream(draw: Callable[[], Any]) -> Iterator[Any]:
    """Values one by one from draws of many."""
    while True:
        yield from draw().tolist()


def _lengths(stream: np.random.Generator, median: int, most: int) -> Any:
    return np.clip(np.rint(median * stream.lognormal(0.0, _SPREAD, _AT_ONCE)), 1, most).astype(int)


def _warped(steady: Seconds, traffic: Traffic) -> Seconds:
    """Bend the time of a steady process into the shape asked for; the mean rate stays."""
    match traffic.shape:
        case Shape.STEADY:
            return steady
        case Shape.ON_OFF:
            half = traffic.period_s / 2
            return (steady / 2 // half) * traffic.period_s + steady / 2 % half
        case Shape.RAMP:
            return sqrt(steady * traffic.seconds)

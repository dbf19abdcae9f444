"""Synthetic traffic: when requests come, for which model, how long. Each choice has a random stream of its own. Pure.

The streams are independent, so changing the rate changes no length, and changing the lengths moves no arrival.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import sqrt
from random import Random

from nearline.protocol import ModelId, Seconds, SloClass, TenantId

_MAX_PROMPT_TOKENS, _MAX_OUTPUT_TOKENS = 4096, 1024


@dataclass(frozen=True, slots=True)
class Arrival:
    at: Seconds
    model_id: ModelId
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: TenantId = TenantId("default")
    slo_class: SloClass = SloClass.INTERACTIVE
    prefix_hash: int = 0


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


def model_ids(num_models: int) -> list[ModelId]:
    width = len(str(num_models))
    return [ModelId(f"m{index:0{width}d}") for index in range(1, num_models + 1)]


def arrivals(traffic: Traffic) -> Iterator[Arrival]:
    """Yield the arrivals of a run in order of time."""
    gaps, choices, prompts, outputs, tenants, classes = (
        Random(f"{traffic.seed}/{name}") for name in ("gap", "model", "prompt", "output", "tenant", "class")
    )
    names = model_ids(traffic.num_models)
    weights = list(accumulate(1.0 / (rank + 1) ** traffic.zipf for rank in range(traffic.num_models)))
    shape = 1.0 / traffic.cv**2
    steady = 0.0
    while True:
        steady += gaps.gammavariate(shape, 1.0 / (traffic.rate_per_s * shape))
        at = _warped(steady, traffic)
        if at >= traffic.seconds:
            return
        (name,) = choices.choices(names, cum_weights=weights)
        prompt = _length(prompts, traffic.prompt_median, _MAX_PROMPT_TOKENS)
        output = _length(outputs, traffic.output_median, _MAX_OUTPUT_TOKENS)
        tenant = TenantId(f"t{tenants.randrange(traffic.num_tenants)}")
        is_batch = classes.random() < traffic.batch_part
        slo_class = SloClass.BATCH_1M if is_batch else SloClass.INTERACTIVE
        yield Arrival(at, name, prompt, output, tenant, slo_class)


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


def _length(stream: Random, median: int, most: int) -> int:
    return max(1, min(most, round(median * stream.lognormvariate(0.0, 0.8))))

"""Synthetic traffic: when requests come, for which model, how long. Each choice has a random stream of its own. Pure.

The streams are independent, so changing the rate changes no length, and changing the lengths moves no arrival.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from nearline.protocol import ModelId, Seconds

_MAX_PROMPT_TOKENS, _MAX_OUTPUT_TOKENS = 4096, 1024


@dataclass(frozen=True, slots=True)
class Arrival:
    at: Seconds
    model_id: ModelId
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Gamma gaps of mean 1/rate and coefficient of variation `cv` (1: Poisson); models by a Zipf law of exponent `zipf`
    (0: uniform); prompt and output lengths log-normal around their medians."""

    num_models: int
    rate_per_s: float
    seconds: Seconds
    seed: int
    cv: float = 1.0
    zipf: float = 1.0
    prompt_median: int = 200
    output_median: int = 120


def model_ids(num_models: int) -> list[ModelId]:
    width = len(str(num_models))
    return [ModelId(f"m{index:0{width}d}") for index in range(1, num_models + 1)]


def arrivals(traffic: Traffic) -> Iterator[Arrival]:
    """Yield the arrivals of a run in order of time."""
    gaps, choices, prompts, outputs = (
        Random(f"{traffic.seed}/{name}") for name in ("gap", "model", "prompt", "output")
    )
    names = model_ids(traffic.num_models)
    weights = list(accumulate(1.0 / (rank + 1) ** traffic.zipf for rank in range(traffic.num_models)))
    shape = 1.0 / traffic.cv**2
    at = 0.0
    while True:
        at += gaps.gammavariate(shape, 1.0 / (traffic.rate_per_s * shape))
        if at >= traffic.seconds:
            return
        (name,) = choices.choices(names, cum_weights=weights)
        prompt = _length(prompts, traffic.prompt_median, _MAX_PROMPT_TOKENS)
        yield Arrival(at, name, prompt, _length(outputs, traffic.output_median, _MAX_OUTPUT_TOKENS))


def _length(stream: Random, median: int, most: int) -> int:
    return max(1, min(most, round(median * stream.lognormvariate(0.0, 0.8))))

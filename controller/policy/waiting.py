"""How long a request will wait: a mean and a spread per model, calibrated by what then happened. Pure.

With every place taken, a place comes free whenever one of `places` sequences ends, so a request with others ahead of
it waits about (the seconds of those ahead + one more) / places, and the variances add up likewise. The seconds of a
request are the output tokens of its length bucket over the pace measured per sequence. What that leaves out
(batches that slow down, prefill, classes that come in between) is learned: the ratio of real to estimated waits moves
the mean, its scatter widens the spread. Before there are answers, the node's measured step times stand in for the
pace, and the bucket of predicted length for the tokens.
Source: [qlm] request waiting time as a normal sum over bucket statistics and token throughput.
"""

from collections.abc import Mapping
from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

from nearline.controller.policy.prediction import BUCKET_LIMITS, PRIOR_TOKENS, Moments, bucket_of
from nearline.protocol import Seconds, StepTimeModel

QUANTILES = (0.5, 0.9)
MIN_ANSWERS = 8
"""Answers of a model before its waits are estimated at all."""
_ORDINARY_CONTEXT = 512
_ORDINARY_TOKENS = tuple(0.75 * limit for limit in (*BUCKET_LIMITS, 2 * BUCKET_LIMITS[-1]))
"""Tokens of a request of each bucket, before any was seen: the middle of it."""
_LEAST_S = 0.05
_NORMAL = NormalDist()
_Z = {q: _NORMAL.inv_cdf(q) for q in (0.1, *QUANTILES)}


class Wait(NamedTuple):
    """Time until something happens, as a normal distribution cut off at zero."""

    mean_s: Seconds
    std_s: Seconds

    def quantile_s(self, q: float) -> Seconds:
        z = _Z[q] if q in _Z else _NORMAL.inv_cdf(q)
        return max(0.0, self.mean_s + z * self.std_s)

    def then(self, other: "Wait") -> "Wait":
        """Add what follows independently."""
        return Wait(self.mean_s + other.mean_s, sqrt(self.std_s**2 + other.std_s**2))


class WaitEstimator:
    """One model's statistics. `coverage` says how often a real wait was within the quantiles that had been told."""

    def __init__(self) -> None:
        self.num_answers = 0
        self.num_observed = 0
        self.num_covered = dict.fromkeys(QUANTILES, 0)
        self._tokens = [Moments() for _ in range(len(BUCKET_LIMITS) + 1)]
        self._all_tokens = Moments()
        self._pace = Moments()
        self._ratio = Moments()
        self._first_s = Moments()
        self._expected: tuple[Seconds, Wait] | None = None

    def expect(self, steps: StepTimeModel, num_running: int) -> None:
        """Take in what steps were measured to take: the pace of `num_running` sequences of ordinary length together,
        and the first token of an ordinary prompt in the middle of them."""
        step_s = steps.decode_s(num_running, num_running * _ORDINARY_CONTEXT)
        first_s = steps.prefill_s(_ORDINARY_CONTEXT) + step_s
        self._expected = (step_s, Wait(first_s, 0.5 * first_s))

    def finished(self, bucket: int, num_tokens: int, seconds: Seconds) -> None:
        """Learn from an answer: its tokens, and the time it held a place."""
        self.num_answers += 1
        self._tokens[bucket].add(num_tokens)
        self._all_tokens.add(num_tokens)
        self._pace.add(seconds / max(1, num_tokens))

    @property
    def token_s(self) -> Seconds | None:
        """Time per token of a sequence among others, its prefill included; None while too little is known."""
        return self._pace.mean if self.num_answers >= MIN_ANSWERS else None

    def began(self, seconds: Seconds) -> None:
        """Learn how long a dispatched request takes to its first token when a place was free."""
        self._first_s.add(seconds)

    def service(self, bucket: int) -> Wait:
        """Estimate the time a request of a bucket holds a place."""
        if self.num_answers < MIN_ANSWERS and self._expected is not None:
            mean_s = _ORDINARY_TOKENS[bucket] * self._expected[0]
            return Wait(mean_s, mean_s)
        moments = self._tokens[bucket] if self._tokens[bucket].weight >= MIN_ANSWERS else self._all_tokens
        mean_s = moments.mean * self._pace.mean
        scatter = moments.variance * self._pace.mean**2 + self._pace.variance * moments.mean**2
        return Wait(mean_s, sqrt(scatter))

    def estimate(self, ahead: Mapping[int, float], num_running: int, places: int) -> Wait | None:
        """Estimate the wait for a first token, or None while too little is known.

        `ahead` counts the waiting requests that go first by length bucket; `places` is what the instances run at once.
        """
        is_learned = self.num_answers >= MIN_ANSWERS
        if places <= 0 or not (is_learned or self._expected):
            return None
        first = Wait(self._first_s.mean, sqrt(self._first_s.variance))
        if not is_learned and self._expected is not None:
            first = self._expected[1]
        num_ahead = sum(ahead.values()) + max(0, num_running - places)
        if num_running + num_ahead < places:
            return first
        mean_s, variance = 0.0, 0.0
        rest = max(0, num_running - places) + 1
        for bucket, count in (*ahead.items(), (-1, rest)):
            one = self.service(bucket) if bucket >= 0 else self._any_service()
            mean_s += count * one.mean_s
            variance += count * one.std_s**2
        return Wait(mean_s / places, sqrt(variance) / places).then(first)

    def calibrated(self, raw: Wait) -> Wait:
        """Correct an estimate by how earlier ones turned out."""
        if self._ratio.weight < MIN_ANSWERS:
            return raw
        mean_s = raw.mean_s * self._ratio.mean
        scatter = raw.mean_s * sqrt(self._ratio.variance)
        return Wait(mean_s, max(raw.std_s * self._ratio.mean, scatter))

    def observed(self, raw: Wait, actual_s: Seconds) -> None:
        """Compare an estimate, as it was before calibration, with the wait that followed."""
        told = self.calibrated(raw)
        self.num_observed += 1
        for q in QUANTILES:
            self.num_covered[q] += actual_s <= told.quantile_s(q)
        self._ratio.add(actual_s / max(_LEAST_S, raw.mean_s))

    def coverage(self, q: float) -> float:
        return self.num_covered[q] / max(1, self.num_observed)

    def _any_service(self) -> Wait:
        if self.num_answers < MIN_ANSWERS:
            return self.service(bucket_of(PRIOR_TOKENS))
        pace, tokens = self._pace, self._all_tokens
        scatter = tokens.variance * pace.mean**2 + pace.variance * tokens.mean**2
        return Wait(tokens.mean * pace.mean, sqrt(scatter))

"""Length prediction: it learns what there is to learn, says how wrong it is, and orders within its stated bound."""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import exp
from random import Random
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearline.controller.policy.prediction import (
    OVERTAKE_FRACTION,
    Features,
    LengthPredictor,
    bucket_of,
    remaining_tokens,
    shortest_first,
)
from nearline.protocol import TenantId


def features(tenant: str = "t", num_prompt: int = 100, max_tokens: int = 4096) -> Features:
    return Features(TenantId(tenant), None, num_prompt, max_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "bucket"), [(1, 0), (16, 0), (16.5, 1), (128, 3), (129, 4), (2048, 7), (9999, 8)]
)
def test_buckets(num_tokens: float, bucket: int) -> None:
    assert bucket_of(num_tokens) == bucket


def test_it_learns_each_tenants_and_each_prompt_sizes_own_length() -> None:
    predictor, stream = LengthPredictor(), Random(1)
    kinds = {features("brief", 50): 10, features("brief", 2000): 40, features("long", 50): 700}
    for _ in range(300):
        for kind, mean in kinds.items():
            actual = max(1, round(stream.gauss(mean, mean / 10)))
            predictor.learn(kind, predictor.predict(kind), actual)
    for kind, mean in kinds.items():
        assert predictor.predict(kind) == pytest.approx(mean, rel=0.15)
    calibration = predictor.calibration
    assert calibration.num_answers == 900
    assert abs(calibration.error.mean) < 0.05 * calibration.actual.mean, "no bias"


def test_a_caller_never_seen_is_predicted_like_all_and_never_beyond_its_limit() -> None:
    predictor = LengthPredictor()
    assert predictor.predict(features(max_tokens=5)) == 5
    for _ in range(200):
        predictor.learn(features("old"), 128.0, 300)
    assert 200 < predictor.predict(features("new")) <= 300


def test_it_follows_a_change_within_a_few_hundred_answers() -> None:
    predictor = LengthPredictor()
    for actual in [20] * 2000 + [200] * 400:
        predictor.learn(features(), predictor.predict(features()), actual)
    assert predictor.predict(features()) > 150


def test_a_prediction_and_a_lesson_take_less_than_a_millisecond() -> None:
    predictor = LengthPredictor()
    took = []
    for n in range(500):
        kind = features(f"t{n % 40}", 1 + n * 7)
        started = time.perf_counter()
        predictor.learn(kind, predictor.predict(kind), n)
        took.append(time.perf_counter() - started)
    assert median(took) < 1e-3


@dataclass(frozen=True)
class Job:
    order: int
    arrived_at: float
    length_bucket: int
    target_s: float = 1e9
    actual: int = 0


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 8), st.floats(1, 60)), max_size=20), st.floats(100, 200))
def test_nobody_younger_goes_before_one_that_waited_its_part_of_the_target(
    rows: list[tuple[float, int, float]], now: float
) -> None:
    rows = sorted(rows)
    jobs = [Job(n, *row) for n, row in enumerate(rows)]
    ranked = shortest_first(jobs, now)
    assert sorted(job.order for job in ranked) == [job.order for job in jobs]
    for place, job in enumerate(ranked):
        if now >= job.arrived_at + OVERTAKE_FRACTION * job.target_s:
            assert all(earlier.order < job.order for earlier in ranked[:place])


def mean_completion_s(predict: Callable[[Features, int], float], learn: LengthPredictor | None = None) -> float:
    """One server at load 0.9; three kinds of caller whose answers differ twenty-fold. Mean time from arrival to end."""
    stream, now, free_at, waiting, done = Random(7), 0.0, 0.0, [], []
    kinds = [(features("a", 50), 20), (features("b", 50), 100), (features("c", 900), 400)]
    for order in range(3000):
        now += stream.expovariate(0.9 / 173.3)
        kind, mean = stream.choice(kinds)
        actual = max(1, round(stream.gauss(mean, mean / 5)))
        while waiting and free_at <= now:
            _, _, arrived_at, length, what, predicted = heapq.heappop(waiting)
            free_at = max(free_at, arrived_at) + length
            done.append(free_at - arrived_at)
            if learn is not None:
                learn.learn(what, predicted, length)
        predicted = predict(kind, actual)
        heapq.heappush(waiting, (bucket_of(predicted), order, now, actual, kind, predicted))
    return fmean(done)


def noisy(scatter: float) -> Callable[[Features, int], float]:
    """Predictions off by a factor of up to e to the `scatter` either way."""
    stream = Random(3)
    return lambda _, actual: actual * exp(stream.uniform(-scatter, scatter))


def test_the_gain_grows_with_how_well_predictions_tell_long_from_short() -> None:
    means = [mean_completion_s(noisy(scatter)) for scatter in (0.0, 1.0, 2.0, 4.0, 20.0)]
    assert means == sorted(means), "from perfect to hardly better than none"
    assert means[0] < 0.7 * means[-1]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_with_all_there_and_perfect_predictions_no_order_has_a_smaller_mean(buckets: list[int]) -> None:
    jobs = [Job(n, 0.0, bucket) for n, bucket in enumerate(buckets)]

    def total(order: Sequence[Job]) -> int:
        return sum((len(order) - n) * (1 + job.length_bucket) for n, job in enumerate(order))

    assert total(shortest_first(jobs, 0.0)) == min(total(order) for order in permutations(jobs))


@given(st.lists(st.floats(0, 100), max_size=20), st.integers(0, 8))
def test_a_constant_prediction_is_first_come_first_served(arrivals: list[float], bucket: int) -> None:
    jobs = [Job(n, at, bucket, 60.0) for n, at in enumerate(sorted(arrivals))]
    assert shortest_first(jobs, 100.0) == jobs


def test_perfect_is_best_ours_is_close_constant_is_first_come_and_inverted_is_worst() -> None:
    predictor = LengthPredictor()
    perfect = mean_completion_s(lambda _, actual: actual)
    ours = mean_completion_s(lambda kind, _: predictor.predict(kind), predictor)
    constant = mean_completion_s(lambda *_: 100.0)
    inverted = mean_completion_s(lambda _, actual: 3000.0 / actual)
    assert perfect <= ours <= 1.2 * perfect
    assert ours < 0.75 * constant
    assert constant < inverted


@pytest.mark.parametrize(
    ("predicted", "done", "limit", "rest"),
    [(100, 30, 500, 70), (100, 200, 500, 100), (100, 480, 500, 20), (9, 9, 9, 1)],
)
def test_what_is_still_to_come_is_the_rest_of_the_prediction_or_half_of_what_outran_it(
    predicted: float, done: float, limit: int, rest: float
) -> None:
    assert remaining_tokens(predicted, done, limit) == rest

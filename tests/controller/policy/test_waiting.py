"""Waiting times as distributions: their mean follows queueing, their quantiles cover what they say."""

import heapq
from random import Random
from statistics import fmean

import pytest

from nearline.controller.policy.waiting import MIN_ANSWERS, QUANTILES, Wait, WaitEstimator
from nearline.protocol import StepTimeModel


def test_nothing_is_estimated_before_there_are_answers_or_places() -> None:
    waits = WaitEstimator()
    assert waits.estimate({}, 0, 4) is None
    for _ in range(MIN_ANSWERS):
        waits.finished(3, 100, 2.0)
    assert waits.estimate({}, 0, 0) is None
    assert waits.estimate({}, 0, 4) is not None


TABLE = [
    ("a free place: only the first token", {}, 3, 0.5),
    ("every place taken: until the first of four ends", {}, 4, 0.5 + 2 / 4),
    ("seven of the same length go first", {3: 7.0}, 4, 0.5 + 8 * 2 / 4),
    ("two of them wait in the engine", {3: 5.0}, 6, 0.5 + 8 * 2 / 4),
    ("half a turn of another tenant counts half", {3: 0.5}, 4, 0.5 + 1.5 * 2 / 4),
]


@pytest.mark.parametrize(("what", "ahead", "num_running", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_the_mean_is(what: str, ahead: dict[int, float], num_running: int, expected: float) -> None:
    waits = WaitEstimator()
    for _ in range(20):
        waits.finished(3, 100, 2.0)
        waits.began(0.5)
    found = waits.estimate(ahead, num_running, 4)
    assert found is not None
    assert found.mean_s == pytest.approx(expected)


def test_buckets_differ_in_what_they_cost() -> None:
    waits = WaitEstimator()
    for _ in range(20):
        waits.finished(1, 20, 1.0)
        waits.finished(5, 400, 20.0)
    assert waits.service(1).mean_s == pytest.approx(1.0)
    assert waits.service(5).mean_s == pytest.approx(20.0)
    assert waits.service(8).mean_s == pytest.approx(10.5), "a bucket never seen costs what all do"


def test_quantiles_are_the_normal_distribution_s_and_never_negative() -> None:
    assert Wait(10.0, 2.0).quantile_s(0.9) == pytest.approx(10 + 1.2816 * 2, rel=1e-3)
    assert Wait(1.0, 5.0).quantile_s(0.1) == 0.0
    assert Wait(3.0, 3.0).then(Wait(1.0, 4.0)) == Wait(4.0, 5.0)


def run(num_requests: int, places: int, load: float, bias: float = 1.0) -> tuple[WaitEstimator, list[float]]:
    """First come, first served before `places` places; answers of three lengths. Feed and ask the estimator."""
    stream, waits, now, ratios = Random(3), WaitEstimator(), 0.0, []
    free = [0.0] * places
    queue: list[tuple[float, int]] = []  # (begins at, bucket)
    running: list[tuple[float, float, int, int]] = []  # (ends at, seconds, bucket, tokens)
    for _ in range(num_requests):
        bucket, mean = stream.choice([(1, 25), (3, 100), (5, 400)])
        tokens = max(1, round(stream.gauss(mean, mean / 4)))
        seconds = tokens * 0.02 * bias
        now += stream.expovariate(load * places / 3.5)
        while running and running[0][0] <= now:
            _, took, kind, count = heapq.heappop(running)
            waits.finished(kind, count, took)
        queue = [entry for entry in queue if entry[0] > now]
        ahead: dict[int, float] = {}
        for _, kind in queue:
            ahead[kind] = ahead.get(kind, 0.0) + 1
        begins = max(now, heapq.heappop(free))
        heapq.heappush(free, begins + seconds)
        heapq.heappush(running, (begins + seconds, seconds, bucket, tokens))
        num_running = len(running) - 1 - len(queue)
        queue.append((begins, bucket))
        raw = waits.estimate(ahead, num_running, places)
        if raw is not None and begins > now:
            told = waits.calibrated(raw)
            waits.observed(raw, begins - now)
            ratios.append((begins - now) / told.mean_s)
    return waits, ratios


@pytest.mark.parametrize(("places", "load"), [(1, 0.8), (4, 0.95), (16, 1.05)])
def test_the_told_quantiles_cover_the_waits_that_follow(places: int, load: float) -> None:
    waits, ratios = run(6000, places, load)
    assert waits.num_observed > 1000
    assert fmean(ratios) == pytest.approx(1.0, abs=0.2)
    assert waits.coverage(0.5) == pytest.approx(0.5, abs=0.15)
    assert waits.coverage(0.9) >= 0.85
    assert QUANTILES == (0.5, 0.9)


def test_without_calibration_the_same_quantiles_fail_when_requests_take_longer_than_the_pace_says() -> None:
    """The control: an estimator that never looks back, before an engine where half the places are taken by others."""
    waits = WaitEstimator()
    for _ in range(50):
        waits.finished(3, 100, 2.0)
    raw = waits.estimate({3: 10.0}, 8, 8)
    assert raw is not None
    stream, num_covered = Random(1), 0
    for _ in range(300):
        actual = raw.mean_s * stream.gauss(2.0, 0.2)
        num_covered += actual <= raw.quantile_s(0.9)
        waits.observed(raw, actual)
    assert num_covered < 30
    assert waits.coverage(0.9) > 0.85


STEPS = StepTimeModel(
    prefill_base_s=0.01, prefill_per_token_s=0.001, prefill_per_square_s=0.0,
    decode_base_s=0.02, decode_per_context_s=0.0, decode_per_sequence_s=0.005,
)  # fmt: skip


def test_measured_steps_stand_in_for_answers_until_there_are_some() -> None:
    waits = WaitEstimator()
    waits.expect(STEPS, num_running=4)
    pace = 0.02 + 4 * 0.005
    first = 0.01 + 0.512 + pace
    free, taken = waits.estimate({}, 0, 4), waits.estimate({3: 7.0}, 4, 4)
    assert free is not None
    assert free.mean_s == pytest.approx(first)
    assert taken is not None
    assert waits.service(3).mean_s == pytest.approx(96 * pace), "the middle of 64 to 128 tokens"
    assert taken.mean_s == pytest.approx(8 * 96 * pace / 4 + first)
    for _ in range(MIN_ANSWERS):
        waits.finished(3, 100, 2.0)
        waits.began(0.5)
    learned = waits.estimate({}, 0, 4)
    assert learned is not None
    assert learned.mean_s == pytest.approx(0.5), "and answers tell better"

"""What is believed of step times after measuring them; numpy's least squares is the oracle of the fit."""

import random

import numpy as np
import pytest

from nearline.engine.step_law import Law, fit
from nearline.engine.step_pace import StepPace
from nearline.protocol import StepTimeModel, StepWork
from tests.engine.timed_engine import LAW


def test_the_fit_is_the_least_squares_of_relative_errors() -> None:
    draw = random.Random(1)
    rows = [((1.0, n, n * n), (0.01 + 3e-4 * n + 2e-8 * n * n) * draw.uniform(0.9, 1.1)) for n in range(16, 2048, 90)]
    found, error = fit(rows)
    matrix = np.array([[f / y for f in features] for features, y in rows])
    expected, *_ = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)
    assert found == pytest.approx(expected, rel=1e-4)
    assert 0.01 < error < 0.1


def test_no_constant_is_negative_even_where_that_would_fit_better() -> None:
    found, _ = fit([((1.0, n, n * n), 1e-4 * n) for n in (16, 64, 256, 1024)])
    assert min(found) >= 0.0
    bent, _ = fit([((1.0, n), 1e-4 * (n - 8)) for n in (16, 64, 256, 1024)])
    assert bent[0] == 0.0


def test_what_is_not_measured_any_more_stays_believed() -> None:
    pace = StepPace(LAW, is_profiled=True)
    for step in range(2000):
        pace.observe(StepWork().and_decode(100 + step), LAW.decode_s(1, 100 + step))
    assert pace.model.prefill_s(500) == pytest.approx(LAW.prefill_s(500))
    assert pace.model.decode_s(16, 8000) == pytest.approx(LAW.decode_s(16, 8000), rel=0.1)


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 10.0])
def test_a_device_that_is_faster_or_slower_than_believed_is_known_after_a_dozen_steps(factor: float) -> None:
    pace, draw = StepPace(LAW, is_profiled=False), random.Random(2)
    for _ in range(12):
        work = StepWork().and_prefill(draw.randint(16, 200), draw.randint(0, 500)).and_decode(300)
        pace.observe(work, factor * LAW.step_s(work) * draw.uniform(0.95, 1.05))
        decode = StepWork().and_decode(draw.randint(10, 500)).and_decode(100)
        pace.observe(decode, factor * LAW.step_s(decode) * draw.uniform(0.95, 1.05))
    assert pace.model.prefill_s(128) == pytest.approx(factor * LAW.prefill_s(128), rel=0.2)
    assert pace.model.decode_s(2, 300) == pytest.approx(factor * LAW.decode_s(2, 300), rel=0.2)


def test_one_step_that_waited_for_something_else_ruins_nothing() -> None:
    pace = StepPace(LAW, is_profiled=True)
    work = StepWork().and_prefill(100)
    for _ in range(20):
        pace.observe(work, LAW.step_s(work))
    pace.observe(work, 60.0)
    assert pace.model.step_s(work) < 1.5 * LAW.step_s(work)


def test_a_law_without_measurements_says_what_it_was_told() -> None:
    law = Law((1.0, 2.0))
    law.anchor((1, 10), 0.5)
    law.settle(10)
    assert law.predict((1, 10)) == pytest.approx(21.0)
    assert StepTimeModel.guess(10**9).decode_s(1, 0) > 0

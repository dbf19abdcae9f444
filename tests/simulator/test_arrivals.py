"""Synthetic traffic has the statistics it promises, and streams that do not disturb each other."""

from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from nearline.simulator import Shape, Traffic, arrivals
from nearline.simulator.arrivals import model_ids


def traffic(**changes: object) -> Traffic:
    base = {"num_models": 10, "rate_per_s": 50.0, "seconds": 400.0, "seed": 3}
    return Traffic(**{**base, **changes})


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(cv: float) -> None:
    times = [0.0, *(a.at for a in arrivals(traffic(cv=cv)))]
    gaps = [b - a for a, b in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.12)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.12)


def test_popularity_follows_zipf() -> None:
    names = [a.model_id for a in arrivals(traffic(zipf=1.0))]
    first, second, fifth = (names.count(model_ids(10)[i]) for i in (0, 1, 4))
    assert first / second == pytest.approx(2.0, rel=0.1)
    assert first / fifth == pytest.approx(5.0, rel=0.1)


def test_a_run_repeats_and_another_seed_differs() -> None:
    assert list(arrivals(traffic())) == list(arrivals(traffic()))
    assert list(arrivals(traffic())) != list(arrivals(traffic(seed=4)))


def test_changing_the_rate_changes_neither_models_nor_lengths() -> None:
    slow, fast = list(arrivals(traffic(rate_per_s=10.0))), list(arrivals(traffic(rate_per_s=20.0)))
    assert [(a.model_id, a.num_prompt_tokens, a.num_output_tokens) for a in slow] == [
        (a.model_id, a.num_prompt_tokens, a.num_output_tokens) for a in fast[: len(slow)]
    ]
    assert [a.at for a in slow] != [a.at for a in fast[: len(slow)]]


def test_shapes_keep_the_mean_rate_and_put_it_where_they_say() -> None:
    for shape in Shape:
        times = [a.at for a in arrivals(traffic(shape=shape, period_s=40.0))]
        assert len(times) == pytest.approx(50 * 400, rel=0.06), shape
        if shape is Shape.ON_OFF:
            assert all(at % 40.0 < 20.0 + 1e-6 for at in times)
        if shape is Shape.RAMP:
            assert sum(at < 200 for at in times) / len(times) == pytest.approx(0.25, abs=0.03)

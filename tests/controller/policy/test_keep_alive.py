"""Learned keep-alive: gaps in, windows out; the control is a fixed time."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearline.controller.policy.keep_alive import MIN_GAPS, GapHistogram, Window

LEAST_S, MOST_S, START_S = 5.0, 3600.0, 2.0


def learned(gaps: list[float]) -> GapHistogram:
    histogram = GapHistogram()
    for gap in gaps:
        histogram.note(gap)
    return histogram


def window(gaps: list[float]) -> Window:
    return learned(gaps).window(LEAST_S, MOST_S, START_S)


def test_before_enough_gaps_were_seen_the_longest_time_holds() -> None:
    assert window([20.0] * (MIN_GAPS - 1)) == Window(0.0, MOST_S)


def test_short_gaps_are_outlived_by_little() -> None:
    found = window([20.0] * 50)
    assert found.begin_s == 0.0
    assert 20.0 < found.end_s < 20.0 * 1.25 * 1.1 + 0.01


def test_a_model_called_every_half_hour_goes_at_once_and_is_there_again_in_time() -> None:
    found = window([1800.0] * 30)
    assert 1800 * 0.65 < found.begin_s < 1800 - START_S
    assert 1800 < found.end_s <= MOST_S


def test_gaps_beyond_the_longest_time_are_not_waited_for() -> None:
    assert window([20_000.0] * 30) == Window(0.0, LEAST_S)


def test_gaps_of_every_size_show_no_shape() -> None:
    assert window([0.11 * 1.25**n for n in range(52)]) == Window(0.0, MOST_S)


def test_a_change_of_rhythm_is_learned() -> None:
    histogram = learned([600.0] * 2000 + [10.0] * 2000)
    assert histogram.window(LEAST_S, MOST_S, START_S).end_s < 30


@given(st.lists(st.floats(0, 1e6), max_size=200), st.floats(0, 100), st.floats(100, 1e4), st.floats(0, 60))
def test_a_window_stays_within_its_limits(gaps: list[float], least: float, most: float, start: float) -> None:
    found = learned(gaps).window(least, most, start)
    assert 0 <= found.begin_s < max(most, 1)
    assert least <= found.end_s <= most


@pytest.mark.parametrize("period_s", [40.0, 900.0])
def test_learned_windows_keep_calls_warm_for_fewer_instance_seconds_than_the_fixed_time(period_s: float) -> None:
    """Calls about every `period_s`: the same calls are met warm, for less."""
    stream, histogram = Random(4), GapHistogram()
    warm, held_s, fixed_held_s, calls = 0, 0.0, 0.0, 400
    for _ in range(calls):
        gap = period_s * stream.uniform(0.9, 1.1)
        found = histogram.window(LEAST_S, MOST_S, START_S)
        warm += found.begin_s <= gap <= found.end_s
        held_s += min(gap, found.end_s) - min(gap, found.begin_s) + (LEAST_S if found.begin_s else 0.0)
        fixed_held_s += min(gap, MOST_S)
        histogram.note(gap)
    assert warm >= 0.97 * calls
    assert held_s <= fixed_held_s
    if period_s > 600:
        assert held_s < 0.4 * fixed_held_s

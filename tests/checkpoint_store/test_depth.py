"""Readers are added while bandwidth grows and taken back when it does not."""

from collections.abc import Callable

import pytest

from nearline.checkpoint_store.depth import ReaderDepth


def settle(rate_at: Callable[[int], float], max_readers: int, num_windows: int = 20) -> list[int]:
    depth = ReaderDepth(max_readers)
    return [depth.observe(rate_at(depth.num_readers)) for _ in range(num_windows)]


@pytest.mark.parametrize(
    ("rate_at", "max_readers", "settled"),
    [
        (lambda n: 100.0 * n, 16, 16),  # scales: take all
        (lambda n: min(n, 8) * 100.0, 16, 8),
        (lambda n: 100.0, 8, 4),  # flat: stay where we began
        (lambda n: 100.0 * n, 3, 3),
        (lambda n: 100.0, 1, 1),
    ],
)
def test_depth_settles_where_more_readers_stop_paying(
    rate_at: Callable[[int], float], max_readers: int, settled: int
) -> None:
    assert settle(rate_at, max_readers)[-1] == settled


def test_it_starts_at_four_or_at_the_limit() -> None:
    assert [ReaderDepth(n).num_readers for n in (1, 2, 3, 4, 8)] == [1, 2, 3, 4, 4]


def test_a_deeper_level_is_tried_again_after_a_while() -> None:
    assert 8 in settle(lambda n: 100.0, 8, 60)[20:]

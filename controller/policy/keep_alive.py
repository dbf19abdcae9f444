"""How long a quiet model stays up, learned from its own gaps, and when its next call is worth preparing for. Pure.

A gap is the time from a model's last end to its next arrival. Once enough have been seen and they gather somewhere, the
model stays up for nearly all of them; if even the shortest are long, it goes at once and is prepared again shortly
before they end. Until then, and for gaps without a shape, the longest time holds. Old gaps fade.
Source: [hybrid] histogram policy of serverless functions: 5th and 99th percentile, margins of a tenth, and a fallback
when the bins say nothing; ours has bins that grow by a quarter, from a tenth of a second to eight hours.
"""

from dataclasses import dataclass
from math import log

from nearline.protocol import Seconds

MIN_GAPS = 8
_FIRST_S, _RATIO, _NUM_BINS = 0.1, 1.25, 56
_HEAD, _TAIL, _MARGIN = 0.05, 0.99, 0.1
_MEMORY = 512.0
_WORTH = 4.0
"""Times longer than a start, or the least keep-alive, must an absence be."""
_LEAST_VARIATION = 2.0
"""Bins whose counts vary less than this (standard deviation over mean) show no shape."""


@dataclass(frozen=True, slots=True)
class Window:
    """After a model falls quiet: from `begin_s` to `end_s` an instance should be there. `begin_s` 0: all along."""

    begin_s: Seconds
    end_s: Seconds


class GapHistogram:
    """Counts of one model's gaps."""

    def __init__(self) -> None:
        self.num_gaps = 0
        self._counts = [0.0] * _NUM_BINS
        self._total = 0.0

    def note(self, gap_s: Seconds) -> None:
        """Count one gap."""
        self.num_gaps += 1
        if self._total >= _MEMORY:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2
        self._counts[_bin(gap_s)] += 1
        self._total += 1

    def window(self, least_s: Seconds, most_s: Seconds, start_s: Seconds) -> Window:
        """Say when an instance should be there: for at least `least_s`, at most until `most_s` after the last end.

        `start_s` is what a start costs: going away and coming back in a gap must be worth it.
        """
        if self.num_gaps < MIN_GAPS or self._variation() < _LEAST_VARIATION:
            return Window(0.0, most_s)
        head_s, tail_s = self._quantile_s(_HEAD, 0) * (1 - _MARGIN), self._quantile_s(_TAIL, 1) * (1 + _MARGIN)
        end_s = min(max(least_s, tail_s), most_s)
        begin_s = head_s - start_s
        if begin_s <= _WORTH * max(least_s, start_s):
            return Window(0.0, end_s)
        return Window(begin_s, end_s) if begin_s < most_s else Window(0.0, least_s)

    def _quantile_s(self, part: float, edge: int) -> Seconds:
        """The lower (0) or upper (1) end of the bin in which the quantile lies."""
        seen = 0.0
        for index, count in enumerate(self._counts):
            seen += count
            if seen >= part * self._total:
                return _FIRST_S * _RATIO ** (index - 1 + edge) if index else _FIRST_S * edge
        return _FIRST_S * _RATIO**_NUM_BINS

    def _variation(self) -> float:
        mean = self._total / _NUM_BINS
        variance = sum((count - mean) ** 2 for count in self._counts) / _NUM_BINS
        return float(variance**0.5 / mean) if mean else 0.0


def _bin(gap_s: Seconds) -> int:
    if gap_s <= _FIRST_S:
        return 0
    return min(_NUM_BINS - 1, 1 + int(log(gap_s / _FIRST_S) / log(_RATIO)))

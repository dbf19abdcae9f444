"""A duration as it has lately been measured. Pure."""

from nearline.protocol import Seconds

WEIGHT = 0.3
"""Share of the newest measurement; the first one replaces the guess."""


class Pace:
    """Exponentially weighted mean of a duration, with a guess until it is measured."""

    def __init__(self, guess_s: Seconds) -> None:
        self.value_s = guess_s
        self._is_measured = False

    def observe(self, measured_s: Seconds) -> None:
        """Take in one measurement."""
        weight = WEIGHT if self._is_measured else 1.0
        self.value_s += weight * (measured_s - self.value_s)
        self._is_measured = True

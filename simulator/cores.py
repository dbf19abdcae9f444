"""The cores of a node whose slots have none of their own: everything that computes there at a time shares them. Pure.

Processor sharing: of n that compute at once, each goes on at 1 / (1 + slowdown · (n - 1)) of its pace alone. Slowdown 0
is a device for each, 1 is cores that divide fairly; slots of one thread each, with cores for all, come close to 0 and
differ from it by what memory bandwidth they take from each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nearline.protocol import Seconds


@dataclass(slots=True, eq=False)
class _Work:
    left_s: Seconds
    done: Callable[..., None]
    arguments: tuple[Any, ...]


class SharedCores:
    """Takes work in seconds that it would take alone, and calls `done` when it has been computed."""

    def __init__(self, slowdown: float, clock: Callable[[], Seconds], schedule: Callable[..., None]) -> None:
        self._slowdown, self._clock, self._schedule = slowdown, clock, schedule
        self._works: list[_Work] = []
        self._since: Seconds = 0.0
        self._turn = 0

    def compute(self, seconds: Seconds, done: Callable[..., None], *arguments: Any) -> None:
        if not self._slowdown:
            self._schedule(seconds, done, *arguments)
            return
        self._advance()
        self._works.append(_Work(seconds, done, arguments))
        self._look_ahead()

    def _stretch(self) -> float:
        return 1.0 + self._slowdown * (len(self._works) - 1)

    def _advance(self) -> None:
        now = self._clock()
        if self._works:
            passed_s = (now - self._since) / self._stretch()
            for work in self._works:
                work.left_s -= passed_s
        self._since = now

    def _look_ahead(self) -> None:
        """Wait for whoever is done first, if nobody comes or goes before."""
        self._turn += 1
        if self._works:
            first = min(self._works, key=lambda work: work.left_s)
            self._schedule(max(0.0, first.left_s) * self._stretch(), self._is_done, self._turn, first)

    def _is_done(self, turn: int, work: _Work) -> None:
        if turn != self._turn:
            return
        self._advance()
        self._works.remove(work)
        self._look_ahead()
        work.done(*work.arguments)

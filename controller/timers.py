"""Instants at which something may become due, each under one key. Knows no clock. Pure."""

import heapq

from nearline.protocol import Seconds

TimerKey = tuple[str, str]


class Timers:
    """One instant per key: setting a key again replaces it. Due keys come in order of (instant, order of setting)."""

    def __init__(self) -> None:
        self._heap: list[tuple[Seconds, int, TimerKey]] = []
        self._current: dict[TimerKey, tuple[Seconds, int]] = {}
        self._count = 0

    def set(self, key: TimerKey, at: Seconds) -> None:
        if key in self._current and self._current[key][0] == at:
            return
        self._count += 1
        self._current[key] = (at, self._count)
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 64 + 2 * len(self._current):
            self._compact()

    def drop(self, key: TimerKey) -> None:
        """Forget a key; one that is not set is fine."""
        self._current.pop(key, None)

    def next_at(self) -> Seconds | None:
        """The earliest instant that is still wanted."""
        while self._heap:
            at, count, key = self._heap[0]
            if self._current.get(key) == (at, count):
                return at
            heapq.heappop(self._heap)
        return None

    def due(self, now: Seconds) -> TimerKey | None:
        """Take the earliest key whose instant has come, or None."""
        at = self.next_at()
        if at is None or at > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._current[key]
        return key

    def _compact(self) -> None:
        self._heap = [(at, count, key) for key, (at, count) in self._current.items()]
        heapq.heapify(self._heap)

"""Instants at which something may become due, each under one key. Knows no clock. Pure."""

import heapq

from nearline.protocol import Seconds

TimerKey = tuple[str, str]
_Entry = tuple[Seconds, int, TimerKey]


class Timers:
    """One instant per key: setting a key again replaces it. Due keys come in order of (instant, order of setting)."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._current: dict[TimerKey, _Entry] = {}  # all else in the heap was replaced or dropped
        self._count = 0

    def set(self, key: TimerKey, at: Seconds) -> None:
        entry = self._current.get(key)
        if entry is not None and entry[0] == at:
            return
        self._count += 1
        entry = self._current[key] = (at, self._count, key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 2 * len(self._current):
            self._compact()

    def drop(self, key: TimerKey) -> None:
        """Forget a key; one that is not set is fine."""
        self._current.pop(key, None)

    def next_at(self) -> Seconds | None:
        """The earliest instant that is still wanted."""
        while self._heap:
            entry = self._heap[0]
            if self._current.get(entry[2]) == entry:
                return entry[0]
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
        self._heap = list(self._current.values())
        heapq.heapify(self._heap)

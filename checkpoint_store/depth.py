"""How many readers work at once: as many as still raise the bandwidth. Pure."""

from nearline.protocol import BytesPerSecond

_START = 4
_WORTHWHILE = 1.05
_RETRY_WINDOWS = 32
"""Windows after which a deeper level that did not pay is tried again: disks have neighbours, conditions change."""


class ReaderDepth:
    """Climbs through 1, 2, 4, 8 … readers. A level is kept only while it beats the one below it by 5 %."""

    def __init__(self, max_readers: int) -> None:
        self._levels = [n for n in (1, 2, 4, 8, 16, 32) if n < max_readers] + [max_readers]
        self._level = max(i for i, n in enumerate(self._levels) if n <= _START)
        self._rates: dict[int, BytesPerSecond] = {}
        self._windows_since_up = 0

    @property
    def num_readers(self) -> int:
        return self._levels[self._level]

    def observe(self, bytes_per_s: BytesPerSecond) -> int:
        """Take the bandwidth of one window read at the present depth; return the depth for the next."""
        level = self._level
        self._rates[level] = bytes_per_s if level not in self._rates else (self._rates[level] + bytes_per_s) / 2
        self._windows_since_up += 1
        below = self._rates.get(level - 1)
        if below is not None and self._rates[level] < _WORTHWHILE * below:
            self._level -= 1
        elif level + 1 < len(self._levels) and self._may_climb(level):
            self._level += 1
            self._windows_since_up = 0
        return self.num_readers

    def _may_climb(self, level: int) -> bool:
        above = self._rates.get(level + 1)
        if above is None or self._windows_since_up >= _RETRY_WINDOWS:
            self._rates.pop(level + 1, None)
            return True
        return above >= _WORTHWHILE * self._rates[level]

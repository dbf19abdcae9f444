"""When an engine process is asked for a sign of life, and when its silence means that it hangs. Pure."""

from enum import StrEnum

from nearline.protocol import Seconds

LEAST_LOOKS = 3
"""Looks at an unanswered question before it counts: an agent that was itself asleep has not read the answer yet."""
_FACTOR = 10.0


class Verdict(StrEnum):
    FINE = "fine"
    ASK = "ask"
    HUNG = "hung"


class Pulse:
    """One process. It is watched or at rest; `look` comes at regular intervals."""

    def __init__(self) -> None:
        self.number = 0
        self._patience_s: Seconds | None = None
        self._asked_at: Seconds | None = None
        self._num_looks = 0

    def watch(self, patience_s: Seconds) -> None:
        """Expect answers within `patience_s` from now on."""
        self._patience_s, self._asked_at = patience_s, None

    def rest(self) -> None:
        """Expect none: it may be busy for long, and somebody else knows for how long at most."""
        self._patience_s = self._asked_at = None

    def answered(self, number: int, patience_s: Seconds) -> None:
        """Take in an answer, and how patient to be from now on; one to an older question says nothing about now."""
        if number == self.number and self._patience_s is not None:
            self._asked_at, self._patience_s = None, patience_s

    def look(self, now: Seconds) -> Verdict:
        """Decide what to do about the process now."""
        if self._patience_s is None:
            return Verdict.FINE
        if self._asked_at is None:
            self.number += 1
            self._asked_at, self._num_looks = now, 0
            return Verdict.ASK
        self._num_looks += 1
        is_late = now - self._asked_at >= self._patience_s and self._num_looks >= LEAST_LOOKS
        return Verdict.HUNG if is_late else Verdict.FINE


def patience_s(longest_step_s: Seconds, least_s: Seconds) -> Seconds:
    """How long an engine may be silent: many times the longest step it predicts, and never less than `least_s`."""
    return max(least_s, _FACTOR * longest_step_s)

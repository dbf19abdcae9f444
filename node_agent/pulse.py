"""When an engine process is asked for a sign of life, and when its silence means that it hangs. Pure."""

from enum import StrEnum

from nearline.protocol import CheckpointInfo, Seconds, StepProfile, StepTimeModel

LEAST_LOOKS = 3
"""Looks at an unanswered question before it counts: an agent that was itself asleep has not read the answer yet."""
_STEP_TOKENS = 512
_FACTOR, _WHOLE_FACTOR = 10.0, 2.0


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

    def answered(self, number: int) -> None:
        """Take in an answer; one to an older question says nothing about now."""
        if number == self.number:
            self._asked_at = None

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


def patience_s(checkpoint: CheckpointInfo | None, profile: StepProfile | None, least_s: Seconds) -> Seconds:
    """How long an engine may be silent: many times its longest step, and never less than `least_s`."""
    if checkpoint is None:  # deleted meanwhile: it serves its last requests
        return least_s
    model = profile.model if profile else StepTimeModel.guess(checkpoint.num_bytes)
    context = max(_STEP_TOKENS, checkpoint.max_context_tokens)
    longest_s = model.prefill_s(_STEP_TOKENS, context - _STEP_TOKENS)
    return max(least_s, _FACTOR * longest_s, _WHOLE_FACTOR * model.prefill_s(context))

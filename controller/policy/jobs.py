"""What becomes of a job: how urgent its next attempt is, and whether a failed one is followed by another. Pure."""

from dataclasses import dataclass

from nearline.protocol import Seconds, Slo, SloClass
from nearline.protocol.errors import ERRORS, Busy, DeadlineExceeded, NearlineError, StorageFull

SOON_S: Seconds = 120.0
"""A job due within this time belongs to the class that must start within a minute."""
LEAST_S: Seconds = 1.0
"""An attempt gets at least this long: what is due at once is told that it is late by its run, not by an accident."""
PAUSES_S: tuple[Seconds, Seconds] = (1.0, 30.0)
"""The first pause between two attempts, and the longest."""


@dataclass(frozen=True, slots=True)
class Expire:
    """Its deadline passed while it ran."""


@dataclass(frozen=True, slots=True)
class Fail:
    """No other attempt can help."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Another attempt follows after a pause; `is_failure` counts it against the job's attempts."""

    pause_s: Seconds
    is_failure: bool


Verdict = Expire | Fail | Retry


def promise(left_s: Seconds | None) -> Slo:
    """Make the promise of an attempt of a job that has `left_s` until its deadline."""
    left_s = max(left_s or 0.0, LEAST_S)
    return Slo(SloClass.BATCH_1M if left_s <= SOON_S else SloClass.BATCH_1H, deadline_s=left_s)


def verdict(error: BaseException, attempt: int, pauses_s: tuple[Seconds, Seconds] = PAUSES_S) -> Verdict:
    """Judge an attempt (from 1) that ended with an error; what is no error of ours may be anything, so it is retried.

    The error's own `retry_after_s` is the pause if it has one, else the pause doubles with every attempt. A caller who
    waits is told at once that memory or a disk is full; a job has time until there is room again.
    """
    if isinstance(error, DeadlineExceeded):
        return Expire()
    is_full = isinstance(error, StorageFull)
    if isinstance(error, NearlineError) and not ERRORS[type(error)].is_retryable and not is_full:
        return Fail()
    asked_s = error.retry_after_s if isinstance(error, NearlineError) else None
    first_s, last_s = pauses_s
    pause_s = min(last_s, first_s * 2.0 ** min(attempt - 1, 10)) if asked_s is None else asked_s
    return Retry(pause_s, is_failure=not (is_full or isinstance(error, Busy)))

"""Every number that clients may set, and what it may be: kinds here, so that a refusal can say what would do. Pure.

No number passes that a frame cannot hold, a clock cannot take or nobody can mean; true and false are no numbers.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

MAX_COUNT = 2**31 - 1
MAX_CHOICES = 128
MAX_SPAN_S = 1e9
"""Clocks take no longer ones."""
MAX_SPAN_MS = 1e9
EVER = -1.0
"""A keep-alive without an end."""
NO_NUMBER = "no_number"
"""Type of the errors raised here, whose text says all."""


def real(least: float, most: float, what: str = "a number", also: dict[float, str] | None = None) -> BeforeValidator:
    """A finite number within bounds, or one of a few that mean something of their own."""
    return BeforeValidator(_check((int, float), least, most, what, also or {}))


def whole(least: int, most: int, what: str = "a whole number", also: dict[float, str] | None = None) -> BeforeValidator:
    """An integer within bounds, or one of a few that mean something of their own."""
    return BeforeValidator(_check((int,), least, most, what, also or {}))


def _check(
    kinds: tuple[type, ...], least: float, most: float, what: str, also: dict[float, str]
) -> Callable[[Any], Any]:
    expected = ", ".join(f"{_written(number)} ({meaning})" for number, meaning in also.items())
    expected += " or " if also else ""
    expected += _written(least) if least == most else f"{what} from {_written(least)} to {_written(most)}"

    def check(value: Any) -> Any:
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if is_number and (value in also or least <= value <= most):  # neither is true of NaN
            return value
        raise PydanticCustomError(NO_NUMBER, "{expected}", {"expected": expected})

    return check


def _written(number: float) -> str:
    return f"{number:,.0f}" if math.floor(number) == number else f"{number:g}"


TtftMs = Annotated[float, real(1, MAX_SPAN_MS, "a number of milliseconds")]
TpotMs = Annotated[float, real(0.01, MAX_SPAN_MS, "a number of milliseconds")]
DeadlineMs = Annotated[float, real(1, MAX_SPAN_MS, "a number of milliseconds")]
DeadlineS = Annotated[float, real(0.001, MAX_SPAN_S, "a number of seconds")]
JobDeadlineS = Annotated[float, real(0.001, 30 * 86_400, "a number of seconds")]
KeepAliveS = Annotated[float, real(0.001, MAX_SPAN_S, "a number of seconds", {EVER: "for ever", 0: "not at all"})]
KeepAliveMinS = Annotated[float, real(0.001, MAX_SPAN_S, "a number of seconds", {0: "not at all"})]
Temperature = Annotated[float, real(0, 2)]
Share = Annotated[float, real(0, 1)]
Penalty = Annotated[float, real(-2, 2)]
RepetitionPenalty = Annotated[float, real(0.01, 10)]
Bias = Annotated[float, real(-100, 100)]
Count = Annotated[int, whole(1, MAX_COUNT)]
CountOrZero = Annotated[int, whole(0, MAX_COUNT)]
TopK = Annotated[int, whole(1, MAX_COUNT, also={-1: "all tokens", 0: "all tokens"})]
Alternatives = Annotated[int, whole(0, 20)]
Seed = Annotated[int, whole(-(2**63), 2**63 - 1)]
Priority = Annotated[int, whole(-1000, 1000)]
MinReplicas = Annotated[int, whole(0, 1000)]
MaxReplicas = Annotated[int, whole(1, 1000)]
Choices = Annotated[int, whole(1, MAX_CHOICES)]
OneChoice = Annotated[int, whole(1, 1)]
Attempts = Annotated[int, whole(1, 100)]

"""A value that a client sent, as a message to that client quotes it: as JSON would write it, and short. Pure."""

import math
from typing import Any

MAX_SHOWN = 60
_MAX_SHOWN_BITS = 128


def shown(value: Any) -> str:
    """Write a value in at most some MAX_SHOWN characters, on one line, whatever it is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"'{_visible(value)}'" if len(value) <= MAX_SHOWN else _cut(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= _MAX_SHOWN_BITS else f"a number of {_num_digits(value)} digits"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else "NaN" if value != value else "an infinite number"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    return "an object"


def _visible(text: str) -> str:
    """Write out what a terminal would act on instead of showing it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _cut(text: str) -> str:
    return f"'{_visible(text[:MAX_SHOWN])}…' ({len(text):,} characters)"


def _num_digits(value: int) -> int:
    """About how many decimal digits an integer has: writing it out may take too long."""
    return round(value.bit_length() * math.log10(2)) or 1

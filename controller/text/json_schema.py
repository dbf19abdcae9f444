"""JSON schemas as values: their parts by JSON pointer, and the numbers in them that nobody can work with. Pure."""

import math
from collections.abc import Iterator
from typing import Any

MAX_MULTIPLE = 10_000
"""`multipleOf` becomes an automaton with as many states; a million take most of a minute to build."""
_MAX_INTEGER_BITS = 1024
"""Larger than any double."""


def wrong_number(schema: Any) -> str:
    """Say where a number is too large to be one, or a `multipleOf` to be kept to; empty if all are well."""
    for where, value in _parts(schema):
        if not _is_finite(value):
            return f"at {where or '/'}: numbers are finite and below 1.8e308"
        multiple = value.get("multipleOf") if isinstance(value, dict) else None
        if _is_finite(multiple) and _is_large_multiple(multiple):
            return f"at {where or '/'}: multipleOf is limited to {MAX_MULTIPLE} here"
    return ""


def subschemas(schema: Any) -> list[tuple[str, Any]]:
    """Parts that are schemas: values that are objects, and the members of containers such as `properties`, `anyOf`."""
    found = []
    for key, value in _children(schema):
        if isinstance(value, dict):
            found.append((key, value))
        found += [(f"{key}/{name}", one) for name, one in _children(value) if isinstance(one, dict)]
    return found


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """A schema and all values within, however deep, each with its JSON pointer."""
    rest = [("", schema)]
    while rest:
        where, value = rest.pop()
        yield where, value
        rest += [(f"{where}/{key}", child) for key, child in reversed(_children(value))]


def _children(schema: Any) -> list[tuple[str, Any]]:
    if isinstance(schema, dict):
        return [(str(key).replace("~", "~0").replace("/", "~1"), value) for key, value in schema.items()]
    return [(str(index), value) for index, value in enumerate(schema)] if isinstance(schema, list) else []


def _is_finite(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() < _MAX_INTEGER_BITS
    return not isinstance(value, float) or math.isfinite(value)


def _is_large_multiple(multiple: Any) -> bool:
    if isinstance(multiple, bool) or not isinstance(multiple, (int, float)):
        return False
    digits = f"{multiple:.12f}".replace(".", "").strip("0")
    return int(digits or 0) > MAX_MULTIPLE

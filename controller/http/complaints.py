"""What is wrong with a body, in our words: which field, what it was given, and what would do. Pure.

pydantic says it in the words of Python, once for every member of a union, with the members' types in the paths.
"""

import difflib
import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from nearline.controller.http.numbers import NO_NUMBER
from nearline.controller.shown import MAX_SHOWN, shown

Body = type[BaseModel]
Path = tuple[int | str, ...]

_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_MAX_DIGITS = 4000
_MISSING, _UNKNOWN, _BROKEN = "missing", "extra_forbidden", "json_invalid"


class _Nothing:
    """Stands where a field is missing: what is wrong with it says what the field should be."""


@dataclass(frozen=True, slots=True)
class _Complaint:
    """One of pydantic's. `fork` is where in `path` a union begins, whose members complain each for itself."""

    path: Path
    fork: int | None
    kind: str
    given: Any
    context: dict[str, Any]
    message: str


def complaint(cls: Body, error: ValidationError, data: bytes | str | dict[str, Any]) -> tuple[str | None, str]:
    """Say where in a body (None: nowhere in particular) what is wrong, of the first thing that is."""
    if error.errors(include_url=False, include_context=False, include_input=False)[0]["type"] == _BROKEN:
        return None, _no_json(error, data)
    plain = data if isinstance(data, dict) else _read(data)
    found = _all(error, plain)
    first = found[0]
    where = _where(first.path)
    if first.kind == _UNKNOWN:
        return where, _unknown(cls, str(first.path[-1]))
    if first.kind == _MISSING:
        return where, f"it is missing; expected {_expected_at(cls, plain, first.path)}"
    nearest = _nearest(found)
    return _where(nearest[0].path), f"expected {_either(nearest)}, got {shown(nearest[0].given)}"


def _no_json(error: ValidationError, data: bytes | str | dict[str, Any]) -> str:
    if not data:
        return "it is empty; expected a JSON object"
    text = error.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
    return f"it is not JSON: {text.removeprefix('Invalid JSON: ')}"


def _read(data: bytes | str) -> Any:
    """Read what pydantic could read, but for numbers that Python takes too long over."""
    return json.loads(data, parse_int=lambda text: int(text) if len(text) < _MAX_DIGITS else 0)


def _all(error: ValidationError, plain: Any) -> list[_Complaint]:
    found = []
    for row in error.errors(include_url=False):
        path, fork = _path(row["loc"], plain, row["type"])
        found.append(_Complaint(path, fork, row["type"], row["input"], row.get("ctx", {}), row["msg"]))
    return found


def _path(location: Path, plain: Any, kind: str) -> tuple[Path, int | None]:
    """Take the members of unions out of a path: what is no place in the body is one."""
    path: list[int | str] = []
    fork = None
    for number, part in enumerate(location):
        is_absent = kind in (_MISSING, _UNKNOWN) and number == len(location) - 1
        if isinstance(plain, dict) and (part in plain or is_absent):
            path.append(part)
            plain = plain.get(str(part))
        elif isinstance(plain, list) and isinstance(part, int):
            path.append(part)
            plain = plain[part]
        elif fork is None:
            fork = len(path)
    return tuple(path), fork


def _nearest(found: list[_Complaint]) -> list[_Complaint]:
    """Of a union, the members that got furthest before they complained: one of them was meant."""
    first = found[0]
    if first.fork is None:
        return [first]
    head = first.path[: first.fork]
    members = [one for one in found if one.fork == first.fork and one.path[: first.fork] == head]

    def reached(one: _Complaint) -> tuple[int, ...]:
        return tuple(part if isinstance(part, int) else 0 for part in one.path[len(head) :])

    furthest = max(reached(one) for one in members)
    return [one for one in members if reached(one) == furthest]


def _either(members: list[_Complaint]) -> str:
    return " or ".join(dict.fromkeys(_expected(one) for one in members))


def _expected(one: _Complaint) -> str:
    context = one.context
    match one.kind:
        case "literal_error":
            return str(context["expected"])
        case "too_short":
            least = context["min_length"]
            return "a list with at least one entry" if least == 1 else f"a list of at least {least}"
        case "too_long":
            return f"a list of at most {context['max_length']:,}"
        case "string_too_short":
            return "text that is not empty" if context["min_length"] == 1 else f"at least {context['min_length']}"
        case "string_too_long":
            return f"text of at most {context['max_length']:,} characters"
        case "value_error":
            return str(context["error"])
        case _ if one.kind == NO_NUMBER:
            return one.message
    return _EXPECTED.get(one.kind, "something else")


def _expected_at(cls: Body, plain: Any, path: Path) -> str:
    """Say what belongs into a field that is missing, by putting there what cannot belong anywhere."""
    *ahead, name = path
    place = plain
    for part in ahead:
        place = place[part]
    place[name] = nothing = _Nothing()
    try:
        cls.model_validate(plain)
    except ValidationError as error:
        wrong = [one for one in _all(error, plain) if one.given is nothing]
        return _either(wrong) if wrong else "something"
    finally:
        del place[name]
    return "something"


def _where(path: Path) -> str | None:
    return ".".join(_short(str(part)) for part in path) or None


def _short(name: str) -> str:
    visible = "".join(char if char.isprintable() else "?" for char in name[:MAX_SHOWN])
    return visible if len(name) <= MAX_SHOWN else f"{visible}…"


def _unknown(cls: Body, name: str) -> str:
    near = difflib.get_close_matches(name[:MAX_SHOWN], cls.model_fields, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(cls.model_fields))}"
    return f"there is no such field; {hint}"

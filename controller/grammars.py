"""Grammars of answers, checked before anything runs: what passes here, an engine can compile in bounded time."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import llguidance

from nearline.protocol import Grammar, GrammarKind
from nearline.protocol.errors import InvalidRequest

MAX_CHARS = 128 << 10
MAX_SYMBOLS = 100_000
MAX_MULTIPLE = 10_000
"""`multipleOf` becomes an automaton with as many states; a million take most of a minute to build."""

MAX_PROBES = 200
"""Subschemas tried when looking for the wrong one."""


async def check_grammar(grammar: Grammar, param: str) -> None:
    """Raises InvalidRequest naming `param`; for a JSON schema the message points at the part that is wrong."""
    if len(grammar.source) > MAX_CHARS:
        raise InvalidRequest(
            f"{param} has {len(grammar.source)} characters; at most {MAX_CHARS} can be compiled", param=param
        )
    problem = await asyncio.to_thread(_contained_problem, grammar)
    if problem:
        raise InvalidRequest(f"{param}: {problem}", param=param)


def choice_grammar(choices: list[str]) -> Grammar:
    """One of these texts and nothing else."""
    return Grammar(GrammarKind.LARK, "start: " + " | ".join(json.dumps(choice) for choice in choices))


def _contained_problem(grammar: Grammar) -> str:
    try:
        return _problem(grammar)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:  # of the library: no Exception
        return f"it cannot be compiled: {panic}"


def _problem(grammar: Grammar) -> str:
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return _complaint(grammar)
    schema = json.loads(grammar.source)
    large = next((where for where, one in _subschemas(schema) if _has_large_multiple(one)), None)
    if large is not None:
        return f"at {large or '/'}: multipleOf is limited to {MAX_MULTIPLE} here"
    complaint = _complaint(grammar)
    return f"at {_locate(schema, complaint) or '/'}: {complaint}" if complaint else ""


def _complaint(grammar: Grammar) -> str:
    """What llguidance says of a grammar, in one line; empty if nothing is wrong."""
    matcher, limits = llguidance.LLMatcher, llguidance.LLParserLimits(max_grammar_size=MAX_SYMBOLS)
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            made = matcher.grammar_from_json_schema(grammar.source)
        elif grammar.kind is GrammarKind.REGEX:
            made = matcher.grammar_from_regex(grammar.source)
        else:
            made = matcher.grammar_from_lark(grammar.source)
        is_error, messages = matcher.validate_grammar_with_warnings(made, limits=limits)
    except ValueError as error:
        is_error, messages = True, [str(error)]
    return " ".join(messages[0].split())[:500] if is_error else ""


def _subschemas(schema: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """A schema and all values within, each with its JSON pointer."""
    yield where, schema
    for key, value in _children(schema):
        yield from _subschemas(value, f"{where}/{key}")


def _children(schema: Any) -> list[tuple[str, Any]]:
    if isinstance(schema, dict):
        return [(str(key).replace("~", "~0").replace("/", "~1"), value) for key, value in schema.items()]
    return [(str(index), value) for index, value in enumerate(schema)] if isinstance(schema, list) else []


def _has_large_multiple(schema: Any) -> bool:
    multiple = schema.get("multipleOf") if isinstance(schema, dict) else None
    if isinstance(multiple, bool) or not isinstance(multiple, (int, float)):
        return False
    digits = f"{multiple:.12f}".replace(".", "").strip("0")
    return int(digits or 0) > MAX_MULTIPLE


def _locate(schema: Any, complaint: str) -> str:
    """Point at the smallest part that alone causes the same complaint."""
    where, budget = "", MAX_PROBES
    while True:
        for key, value in _descendants(schema):
            budget -= 1
            if budget < 0:
                return where
            if _complaint(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))) == complaint:
                where, schema = f"{where}/{key}", value
                break
        else:
            return where


def _descendants(schema: Any) -> list[tuple[str, Any]]:
    """Parts that are schemas: values that are objects, and the members of containers such as `properties`, `anyOf`."""
    found = []
    for key, value in _children(schema):
        if isinstance(value, dict):
            found.append((key, value))
        found += [(f"{key}/{name}", one) for name, one in _children(value) if isinstance(one, dict)]
    return found

"""Grammars before admission: bad ones are refused in bounded time, and a schema's error says where it is."""

import json
import time
from typing import Any

import llguidance
import pytest

from nearline.controller.grammars import MAX_CHARS, check_grammar, choice_grammar
from nearline.protocol import Grammar, GrammarKind
from nearline.protocol.errors import InvalidRequest

JSON, REGEX, LARK = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK


async def refusal(kind: GrammarKind, source: Any) -> str:
    text = source if isinstance(source, str) else json.dumps(source)
    with pytest.raises(InvalidRequest) as caught:
        await check_grammar(Grammar(kind, text), "the_field")
    assert caught.value.param == "the_field"
    return caught.value.message


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "blob"}, "/"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "blob"}}}}, "/properties/a/items"),
        ({"anyOf": [{"type": "string"}, {"type": "string", "pattern": "("}]}, "/anyOf/1"),
        ({"$defs": {"x": {"type": "no"}}, "properties": {"a": {"$ref": "#/$defs/x"}}}, "/$defs/x"),
        ({"properties": {"a/b~": {"uniqueItems": True, "type": "array"}}}, "/properties/a~1b~0"),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "/properties/a"),
        ({"properties": {"n": {"type": "integer", "multipleOf": 99991}}}, "/properties/n"),
    ],
)
async def test_a_wrong_schema_is_refused_with_a_pointer_to_the_wrong_part(schema: Any, pointer: str) -> None:
    assert f"at {pointer}: " in await refusal(JSON, schema)


@pytest.mark.parametrize("regex", ["(", "[z-a]", "(?=a)b", r"\1", "a{5,2}"])
async def test_a_regex_that_cannot_be_is_refused(regex: str) -> None:
    assert "regex" in await refusal(REGEX, regex)


@pytest.mark.parametrize("lark", ["%%%", "start: nobody", 'begin: "a"', 'start: "a', ""])
async def test_a_lark_grammar_that_cannot_be_is_refused(lark: str) -> None:
    assert await refusal(LARK, lark)


async def test_good_grammars_pass_after_bad_ones() -> None:
    for _ in range(2):
        await refusal(REGEX, "(")
        await check_grammar(Grammar(REGEX, "[a-z]+"), "f")
        recursive = {"$ref": "#/$defs/n", "$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}}
        await check_grammar(Grammar(JSON, json.dumps(recursive)), "f")
        await check_grammar(Grammar(JSON, json.dumps({"type": "number", "multipleOf": 0.01})), "f")
        await check_grammar(Grammar(LARK, 'start: "a" start | "b"'), "f")


async def test_deep_recursive_and_huge_schemas_are_bounded_in_time() -> None:
    deep: Any = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    wide: Any = {"type": "string"}
    for _ in range(11):
        wide = {"type": "object", "properties": {"a": wide, "b": wide}}
    product = {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"minimum": j}}} for j in range(8)]} for i in range(8)]}
    started_at = time.monotonic()
    for schema in (deep, wide, product, {"enum": ["x" * 1000] * 1000}):
        await refusal(JSON, schema)
    assert "at most" in await refusal(REGEX, "a" * (MAX_CHARS + 1))
    assert time.monotonic() - started_at < 5


async def test_a_choice_is_any_text_letter_for_letter(tiny_tokenizer_json: dict[str, Any]) -> None:
    from tokenizers import Tokenizer

    source = json.dumps(tiny_tokenizer_json)
    table, tokenizer = llguidance.LLTokenizer(source, eos_token=258), Tokenizer.from_str(source)
    choices = ['say "hi"', "back\\slash /", "née 😀 \u2028", "two\nlines\t\x7f", "a|b (c) [d] %e", "yes"]
    grammar = choice_grammar(choices)
    await check_grammar(grammar, "guided_choice")
    for text, is_choice in [*[(choice, True) for choice in choices], ("no", False), ("yes ", False)]:
        matcher = llguidance.LLMatcher(table, llguidance.LLMatcher.grammar_from_lark(grammar.source), log_level=0)
        ids = tokenizer.encode(text).ids
        assert (matcher.validate_tokens(ids) == len(ids)) is is_choice, text

"""Grammars before admission: bad ones are refused in bounded time, and a schema's error says where it is."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import llguidance
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearline.controller.text.grammars import MAX_CHARS, GrammarChecker, choice_grammar, schema_grammar
from nearline.protocol import Grammar, GrammarKind
from nearline.protocol.errors import InvalidRequest, Overloaded

JSON, REGEX, LARK = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    await made.close()


async def refusal(checker: GrammarChecker, kind: GrammarKind, source: Any) -> str:
    text = source if isinstance(source, str) else json.dumps(source)
    with pytest.raises(InvalidRequest) as caught:
        await checker.check(Grammar(kind, text), "the_field")
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
async def test_a_wrong_schema_is_refused_with_a_pointer_to_the_wrong_part(
    checker: GrammarChecker, schema: Any, pointer: str
) -> None:
    assert f"at {pointer}: " in await refusal(checker, JSON, schema)


@pytest.mark.parametrize("regex", ["(", "[z-a]", "(?=a)b", r"\1", "a{5,2}"])
async def test_a_regex_that_cannot_be_is_refused(checker: GrammarChecker, regex: str) -> None:
    assert "regex" in await refusal(checker, REGEX, regex)


@pytest.mark.parametrize("lark", ["%%%", "start: nobody", 'begin: "a"', 'start: "a', ""])
async def test_a_lark_grammar_that_cannot_be_is_refused(checker: GrammarChecker, lark: str) -> None:
    assert await refusal(checker, LARK, lark)


async def test_good_grammars_pass_after_bad_ones(checker: GrammarChecker) -> None:
    for _ in range(2):
        await refusal(checker, REGEX, "(")
        await checker.check(Grammar(REGEX, "[a-z]+"), "f")
        recursive = {"$ref": "#/$defs/n", "$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}}
        await checker.check(Grammar(JSON, json.dumps(recursive)), "f")
        await checker.check(Grammar(JSON, json.dumps({"type": "number", "multipleOf": 0.01})), "f")
        await checker.check(Grammar(LARK, 'start: "a" start | "b"'), "f")


async def test_deep_recursive_and_huge_schemas_are_bounded_in_time(checker: GrammarChecker) -> None:
    deep: Any = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    wide: Any = {"type": "string"}
    for _ in range(11):
        wide = {"type": "object", "properties": {"a": wide, "b": wide}}
    product = {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"minimum": j}}} for j in range(8)]} for i in range(8)]}
    started_at = time.monotonic()
    for schema in (deep, wide, product, {"enum": ["x" * 1000] * 1000}):
        await refusal(checker, JSON, schema)
    assert "at most" in await refusal(checker, REGEX, "a" * (MAX_CHARS + 1))
    assert time.monotonic() - started_at < 30


async def test_a_choice_is_any_text_letter_for_letter(
    checker: GrammarChecker, tiny_tokenizer_json: dict[str, Any]
) -> None:
    from tokenizers import Tokenizer

    source = json.dumps(tiny_tokenizer_json)
    table, tokenizer = llguidance.LLTokenizer(source, eos_token=258), Tokenizer.from_str(source)
    choices = ['say "hi"', "back\\slash /", "née 😀 \u2028", "two\nlines\t\x7f", "a|b (c) [d] %e", "yes"]
    grammar = choice_grammar(choices)
    await checker.check(grammar, "guided_choice")
    for text, is_choice in [*[(choice, True) for choice in choices], ("no", False), ("yes ", False)]:
        matcher = llguidance.LLMatcher(table, llguidance.LLMatcher.grammar_from_lark(grammar.source), log_level=0)
        ids = tokenizer.encode(text).ids
        assert (matcher.validate_tokens(ids) == len(ids)) is is_choice, text


def chained(num_rules: int) -> dict[str, Any]:
    """A schema whose definitions lean on each other, one after the other."""
    rules = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(num_rules)}
    return {"$defs": {**rules, f"d{num_rules}": {}}, "$ref": "#/$defs/d0"}


def chained_lark(num_rules: int) -> str:
    rules = [f'r{i}: "a" r{i + 1}?' for i in range(num_rules)]
    return "\n".join(["start: r0", *rules, f'r{num_rules}: "b"'])


FATAL = [
    (JSON, json.dumps(chained(1900))),
    (LARK, chained_lark(6000)),
    (LARK, 'start: %json {"type": "integer", "multipleOf": 10000019}'),
    (JSON, json.dumps({"properties": {f"a{i}": {"type": "integer", "multipleOf": 9973 - i} for i in range(300)}})),
]


@pytest.mark.parametrize(
    ("kind", "source"), FATAL, ids=["deep refs", "deep rules", "hidden multiple", "many multiples"]
)
async def test_a_grammar_that_kills_whoever_compiles_it_is_refused_and_others_go_on(
    checker: GrammarChecker, kind: GrammarKind, source: str
) -> None:
    """Each of these ends a process by its stack, or takes many seconds of computing."""
    good = Grammar(REGEX, "[a-z]+")
    refused, _ = await asyncio.gather(refusal(checker, kind, source), checker.check(good, "f"))
    assert "simplify it" in refused
    await checker.check(Grammar(JSON, json.dumps(chained(100))), "f")


async def test_a_checker_that_dies_or_whose_caller_leaves_serves_the_next(checker: GrammarChecker) -> None:
    await checker.check(Grammar(REGEX, "a"), "f")
    leaving = asyncio.create_task(checker.check(Grammar(*FATAL[2]), "f"))
    await asyncio.sleep(0.05)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await checker.check(Grammar(REGEX, "b"), "f")
    assert "regex" in await refusal(checker, REGEX, "(")


async def test_what_passed_is_not_tried_again(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Grammar(REGEX, "a+")
    await checker.check(known, "f")
    await checker.close()
    monkeypatch.setattr("sys.executable", os.devnull)
    await checker.check(known, "f")
    with pytest.raises(Overloaded, match="cannot be checked now"):
        await checker.check(Grammar(REGEX, "b+"), "f")


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ('{"multipleOf": 1e999}', "/multipleOf"),
        ('{"type": "number", "minimum": -1e999}', "/minimum"),
        ('{"properties": {"a": {"enum": [1, NaN]}}}', "/properties/a/enum/1"),
        ('{"const": {"deep": [Infinity]}}', "/const/deep/0"),
        ('{"maximum": 1%s}' % ("0" * 400), "/maximum"),
    ],
)
async def test_a_number_that_is_none_is_refused_with_its_place(
    checker: GrammarChecker, schema: str, pointer: str
) -> None:
    assert f"at {pointer}: numbers are finite" in await refusal(checker, JSON, schema)
    with pytest.raises(InvalidRequest, match=f"the_field: at {pointer}: numbers are finite"):
        await schema_grammar(json.loads(schema), "the_field")


HORRORS = [
    (JSON, "{"),
    (JSON, '{"enum": [%s]}' % ("[" * 5000 + "]" * 5000)),
    (JSON, '{"properties":{"a":' * 3000 + "{}" + "}}" * 3000),
    (JSON, '{"multipleOf": %s}' % ("9" * 5000)),
    (JSON, '{"$ref": "#"}'),
    (JSON, '{"$ref": "file:///etc/passwd"}'),
    (JSON, '{"pattern": 5}'),
    (JSON, '{"$ref": 5}'),
    (JSON, '{"type": "string", "minLength": 5, "maxLength": 4}'),
    (JSON, '{"const": "\\ud800"}'),
    (REGEX, "(" * 60_000 + ")" * 60_000),
    (REGEX, "\ud800"),
    (LARK, "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    (LARK, "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "b"'),
]


@pytest.mark.parametrize(("kind", "source"), HORRORS, ids=lambda value: str(value)[:20])
async def test_hand_made_horrors_are_refused(checker: GrammarChecker, kind: GrammarKind, source: str) -> None:
    assert await refusal(checker, kind, source)
    await checker.check(Grammar(REGEX, "a"), "f")


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (JSON, json.dumps({"enum": [f"x{i}" for i in range(9000)]})),
        (REGEX, "(a+)+$"),
        (REGEX, "(.*a.{300})&(.*b.{300})"),
        (LARK, 'start: "a" <|im_end|> <[7-9]>'),
    ],
)
async def test_what_only_looks_bad_passes(checker: GrammarChecker, kind: GrammarKind, source: str) -> None:
    await checker.check(Grammar(kind, source), "f")


KEYS = st.sampled_from([
    "type", "properties", "items", "anyOf", "allOf", "oneOf", "not", "enum", "const", "pattern", "format",
    "minimum", "maximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems", "required",
    "additionalProperties", "$ref", "$defs", "patternProperties", "prefixItems", "x-guidance", "a",
])  # fmt: skip
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["string", "object", "array", "integer", "#", "#/$defs/a", "(a+)+", ".*a.{30}", "date", "[z-a]"])
)  # fmt: skip
SCHEMAS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=25
)
LARKS = st.lists(
    st.sampled_from([*'abc()|?*+:%&~"/{}<>[]_\\', "start", ": ", "A", "\n", '"x"', "/a+/", "%json ", "{}", "1", ".."]),
    max_size=40,
).map("".join)


async def test_no_schema_regex_or_lark_grammar_does_worse_than_be_refused(checker: GrammarChecker) -> None:
    """Thousands of odd ones; each is answered, by a process that lives."""
    await checker.check(Grammar(REGEX, "first"), "f")
    pid, questions = checker.process.pid, asyncio.get_running_loop()

    @settings(max_examples=700, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.one_of(SCHEMAS.map(lambda s: (JSON, s)), st.text().map(lambda s: (REGEX, s)), LARKS.map(lambda s: (LARK, s)))
    )
    def try_out(case: tuple[GrammarKind, Any]) -> None:
        asyncio.run_coroutine_threadsafe(asked(*case), questions).result(60)

    async def asked(kind: GrammarKind, source: Any) -> None:
        try:
            grammar = Grammar(kind, source) if kind is not JSON else await schema_grammar(source, "f")
            await checker.check(grammar, "f")
        except InvalidRequest:
            pass

    await asyncio.to_thread(try_out)
    assert checker.process.pid == pid

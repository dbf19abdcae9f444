"""Grammars before admission: bad ones are refused in bounded time, and a schema's error says where it is."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import llguidance
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearline.controller.side_process import SideProcess
from nearline.controller.text import grammars as module
from nearline.controller.text.grammars import MAX_CHARS, GrammarChecker, choice_grammar
from nearline.protocol import Grammar, GrammarKind, TenantId
from nearline.protocol.errors import InvalidRequest, Overloaded

JSON, REGEX, LARK = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK
TENANT = TenantId("t")


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    await made.close()


async def refusal(checker: GrammarChecker, kind: GrammarKind, source: Any) -> str:
    text = source if isinstance(source, str) else json.dumps(source)
    with pytest.raises(InvalidRequest) as caught:
        await checker.check(Grammar(kind, text), "the_field", TENANT)
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
        await checker.check(Grammar(REGEX, "[a-z]+"), "f", TENANT)
        recursive = {"$ref": "#/$defs/n", "$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}}
        await checker.check(Grammar(JSON, json.dumps(recursive)), "f", TENANT)
        await checker.check(Grammar(JSON, json.dumps({"type": "number", "multipleOf": 0.01})), "f", TENANT)
        await checker.check(Grammar(LARK, 'start: "a" start | "b"'), "f", TENANT)


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
    await checker.check(grammar, "guided_choice", TENANT)
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
    refused, _ = await asyncio.gather(refusal(checker, kind, source), checker.check(good, "f", TenantId("another")))
    assert "simplify it" in refused
    await checker.check(Grammar(JSON, json.dumps(chained(100))), "f", TENANT)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SideProcess, str]]:
    """Every grammar that a process was asked about, when it was."""
    found = []
    ask = SideProcess.ask

    async def noted(process: SideProcess, question: bytes, limit_s: float) -> bytes:
        found.append((process, question.decode().partition("\n")[2]))
        return await ask(process, question, limit_s)

    monkeypatch.setattr(SideProcess, "ask", noted)
    return found


async def new_pid(asked: list[tuple[SideProcess, str]], old: int | None = None) -> int:
    """The process that was asked last, once it is there."""
    async with asyncio.timeout(60):
        while not asked or asked[-1][0].pid in (None, old):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    pid = asked[-1][0].pid
    assert pid is not None
    return pid


async def test_a_check_goes_on_when_its_caller_leaves_and_is_the_next_ones(
    checker: GrammarChecker, asked: list[tuple[SideProcess, str]]
) -> None:
    leaving = asyncio.create_task(checker.check(Grammar(*FATAL[2]), "f", TENANT))
    await new_pid(asked)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert "simplify it" in await refusal(checker, *FATAL[2])
    await checker.check(Grammar(REGEX, "b"), "f", TENANT)
    assert [source for _, source in asked] == [FATAL[2][1], "b"]


async def test_a_process_that_another_ends_is_no_fault_of_the_grammar(
    checker: GrammarChecker, asked: list[tuple[SideProcess, str]]
) -> None:
    checking = asyncio.create_task(checker.check(Grammar(*FATAL[2]), "f", TENANT))
    first = await new_pid(asked)
    os.kill(first, signal.SIGKILL)
    os.kill(await new_pid(asked, first), signal.SIGKILL)
    with pytest.raises(Overloaded, match="try again"):
        await checking
    checking = asyncio.create_task(checker.check(Grammar(*FATAL[2]), "f", TENANT))
    os.kill(await new_pid(asked), signal.SIGKILL)
    with pytest.raises(InvalidRequest, match="simplify it"):
        await checking
    assert len(asked) == 4


async def test_a_process_that_cannot_start_is_no_fault_of_the_grammar(
    checker: GrammarChecker, asked: list[tuple[SideProcess, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    for _ in range(2):
        with pytest.raises(Overloaded, match="try again"):
            await checker.check(Grammar(REGEX, "a"), "f", TENANT)
    assert len(asked) == 4


WORKER = """
import sys
from nearline.controller.text import grammar_worker
def fail(grammar):
    raise {0}
grammar_worker.problem = fail
print(grammar_worker._answer(b"regex\\na").decode())
"""


@pytest.mark.parametrize(("error", "is_told"), [("MemoryError", True), ("ValueError", False)])
async def test_the_process_tells_of_lacking_memory_and_ends_by_a_bug_of_ours(error: str, is_told: bool) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER.format(error)), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert (b"simplify it" in out, process.returncode == 0) == (is_told, is_told)


class Gate:
    """Stands for the processes: answers nothing before it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.is_open = asyncio.Event()
        monkeypatch.setattr(SideProcess, "ask", self._ask)

    async def _ask(self, question: bytes, limit_s: float) -> bytes:
        self.asked.append(question.decode().partition("\n")[2])
        await self.is_open.wait()
        return b""


async def passing(checker: GrammarChecker, sources: list[str], tenant: str) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(checker.check(Grammar(REGEX, one), "f", TenantId(tenant))) for one in sources]
    for _ in range(10):
        await asyncio.sleep(0)
    return tasks


async def test_a_tenant_has_one_check_under_way_and_two_have_the_processes(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    tasks = await passing(checker, ["a1", "a2", "a3"], "a")
    tasks += await passing(checker, ["b1", "b2"], "b")
    tasks += await passing(checker, ["c1"], "c")
    assert gate.asked == ["a1", "b1"]
    gate.is_open.set()
    await asyncio.gather(*tasks)
    assert gate.asked[2] == "c1"
    assert sorted(gate.asked) == ["a1", "a2", "a3", "b1", "b2", "c1"]


async def test_who_waits_too_long_for_a_turn_is_told_to_come_again_and_the_others_are_served(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.05)
    gate = Gate(monkeypatch)
    tasks = await passing(checker, ["a1", "a2", "a3"], "a")
    for late in tasks[1:]:
        with pytest.raises(Overloaded, match="try again") as told:
            await late
        assert told.value.retry_after_s == 0.05
    tasks += await passing(checker, ["b1"], "b")
    assert gate.asked == ["a1", "b1"]
    gate.is_open.set()
    await asyncio.gather(tasks[0], tasks[3])
    await checker.check(Grammar(REGEX, "a2"), "f", TenantId("a"))


async def test_what_many_send_at_once_is_tried_once_and_a_refusal_is_remembered(
    checker: GrammarChecker, asked: list[tuple[SideProcess, str]]
) -> None:
    await asyncio.gather(*[checker.check(Grammar(REGEX, "a"), "f", TenantId(str(n))) for n in range(100)])
    refusals = await asyncio.gather(*[refusal(checker, REGEX, "(") for _ in range(100)])
    assert refusals == [await refusal(checker, REGEX, "(")] * 100
    assert [source for _, source in asked] == ["a", "("]


async def test_what_passed_is_not_tried_again(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Grammar(REGEX, "a+")
    await checker.check(known, "f", TENANT)
    await checker.close()
    monkeypatch.setattr("sys.executable", os.devnull)
    await checker.check(known, "f", TENANT)
    with pytest.raises(Overloaded, match="cannot be checked now"):
        await checker.check(Grammar(REGEX, "b+"), "f", TENANT)


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
    (REGEX, "((a{100}){1000}){1000}b"),
    (REGEX, "a((b{100}){1000}){1000}"),
    (LARK, "start: /((a{100}){1000}){1000}b/"),
    (LARK, "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    (LARK, "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "b"'),
]


@pytest.mark.parametrize(("kind", "source"), HORRORS, ids=lambda value: str(value)[:20])
async def test_hand_made_horrors_are_refused(checker: GrammarChecker, kind: GrammarKind, source: str) -> None:
    assert await refusal(checker, kind, source)
    await checker.check(Grammar(REGEX, "a"), "f", TENANT)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (JSON, json.dumps({"enum": [f"x{i}" for i in range(9000)]})),
        (JSON, json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(3000)}})),
        (JSON, json.dumps({"type": "string", "maxLength": 100_000})),
        (REGEX, ""),
        (REGEX, "(a+)+$"),
        (REGEX, "(.*a.{300})&(.*b.{300})"),
        (LARK, 'start: "a" <|im_end|> <[7-9]>'),
    ],
)
async def test_what_only_looks_bad_passes(checker: GrammarChecker, kind: GrammarKind, source: str) -> None:
    await checker.check(Grammar(kind, source), "f", TENANT)


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


async def test_no_schema_regex_or_lark_grammar_does_worse_than_be_refused(
    checker: GrammarChecker, asked: list[tuple[SideProcess, str]]
) -> None:
    """Thousands of odd ones; each is answered, by a process that lives."""
    await checker.check(Grammar(REGEX, "first"), "f", TENANT)
    pid, questions = asked[0][0].pid, asyncio.get_running_loop()

    @settings(max_examples=700, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.one_of(SCHEMAS.map(lambda s: (JSON, s)), st.text().map(lambda s: (REGEX, s)), LARKS.map(lambda s: (LARK, s)))
    )
    def try_out(case: tuple[GrammarKind, Any]) -> None:
        asyncio.run_coroutine_threadsafe(answered(*case), questions).result(60)

    async def answered(kind: GrammarKind, source: Any) -> None:
        try:
            grammar = Grammar(kind, source) if kind is not JSON else Grammar(kind, json.dumps(source))
            await checker.check(grammar, "f", TENANT)
        except InvalidRequest:
            pass

    await asyncio.to_thread(try_out)
    assert {process.pid for process, _ in asked} == {pid}

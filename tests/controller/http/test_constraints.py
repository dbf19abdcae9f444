"""Structured output at the front door: every endpoint takes it, and what is wrong is refused before anything runs."""

import asyncio
import json
from typing import Any

import pytest

from nearline.controller.http.schemas import ChatBody, parse
from nearline.protocol import Grammar, GrammarKind
from nearline.protocol.errors import InvalidRequest
from tests.controller.http.conftest import FrontDoor

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"model": "tiny", "prompt": "a"},
    "/v1/functions/tiny/invocations": {"prompt": "a"},
}
GOOD: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": FORMAT}, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))),
    ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')),
    ({"response_format": {"type": "text"}}, None),
    ({"guided_regex": "[0-9]+"}, Grammar(GrammarKind.REGEX, "[0-9]+")),
    ({"guided_choice": ["yes", "no"]}, Grammar(GrammarKind.LARK, 'start: "yes" | "no"')),
    ({"guided_grammar": 'start: "x"+'}, Grammar(GrammarKind.LARK, 'start: "x"+')),
]
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml|json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "name, schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"items": {"type": "x"}}}}},
        "response_format.json_schema.schema",
        "at /items: Invalid type: x",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format.json_schema", ""),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_choice": []}, "guided_choice", ""),
    ({"guided_choice": ["a", ""]}, "guided_choice.1", ""),
    ({"guided_grammar": "start: x y"}, "guided_grammar", "unknown name"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "exclude each other"),
]


@pytest.mark.parametrize(("fields", "grammar"), GOOD, ids=lambda v: str(v)[:30])
@pytest.mark.parametrize("path", PATHS)
async def test_every_endpoint_hands_the_grammar_to_the_engine(
    front: FrontDoor, path: str, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    status, answer, _ = await front.post(path, PATHS[path] | fields | {"max_tokens": 1})
    assert status == 200, answer
    assert [handle.request.sampling.grammar for handle in front.runtime.handles] == [grammar]


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=lambda v: str(v)[:30])
@pytest.mark.parametrize("path", PATHS)
async def test_what_cannot_be_is_refused_by_name_and_nothing_runs(
    front: FrontDoor, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    status, answer, headers = await front.post(path, PATHS[path] | fields)
    assert (status, headers["x-should-retry"]) == (400, "false")
    assert answer["error"]["param"].startswith(param)
    assert any(part in answer["error"]["message"] for part in message.split("|"))
    assert not front.runtime.handles


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity", "9" * 400, "9" * 4400])
async def test_a_number_that_is_none_in_a_schema_is_refused_with_its_place(front: FrontDoor, number: str) -> None:
    schema = {"properties": {"a": {"multipleOf": "NUMBER"}}}
    fields = {"model": "tiny", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    job = {"model": "tiny", "endpoint": "/v1/completions", "input": fields | {"prompt": "a"}}
    for path, body in (("/v1/completions", fields | {"prompt": ["a", "b"]}), ("/v1/jobs", job)):
        status, answer, _ = await front.post(path, json.dumps(body).replace('"NUMBER"', number))
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer
        place = "/properties/a/multipleOf: numbers are finite"
        assert place in answer["error"]["message"] or len(number) > 4300, "JSON itself has a limit, too"
    assert not front.runtime.handles


@pytest.mark.parametrize("endpoint", ["function", "/v1/chat/completions", "/v1/completions"])
async def test_a_job_with_a_bad_grammar_is_refused_when_it_is_submitted(front: FrontDoor, endpoint: str) -> None:
    path = "/v1/functions/tiny/invocations" if endpoint == "function" else endpoint
    body = {"model": "tiny", "endpoint": endpoint, "input": PATHS[path] | {"guided_regex": "("}}
    status, answer, _ = await front.post("/v1/jobs", body)
    assert (status, answer["error"]["param"]) == (400, "guided_regex")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}, 5])
async def test_forced_tool_calls_are_refused_clearly(front: FrontDoor, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = PATHS["/v1/chat/completions"] | {"tools": tools, "max_tokens": 1}
    status, answer, _ = await front.post("/v1/chat/completions", body | {"tool_choice": choice})
    assert (status, answer["error"]["param"]) == (400, "tool_choice")
    assert "forced tool call" in answer["error"]["message"]
    assert not front.runtime.handles
    for allowed in ("auto", "none", None):
        status, _, _ = await front.post("/v1/chat/completions", body | {"tool_choice": allowed})
        assert status == 200


async def test_a_deeply_nested_body_is_refused_and_the_door_stays_open(front: FrontDoor) -> None:
    deep = '{"properties":{"a":' * 2000 + "{}" + "}}" * 2000
    body = (
        '{"model":"tiny","prompt":"a","response_format":{"type":"json_schema","json_schema":{"name":"a","schema":%s}}}'
    )
    answers = await asyncio.gather(
        front.post("/v1/completions", body % deep), front.post("/v1/completions", {"model": "tiny", "prompt": "a"})
    )
    assert [status for status, _, _ in answers] == [400, 200]


async def test_a_small_body_crosses_to_no_thread_for_its_schema(
    front: FrontDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await front.post("/v1/completions", PATHS["/v1/completions"])
    monkeypatch.setattr(asyncio, "to_thread", None)
    for wanted in ({"type": "json_object"}, FORMAT):
        status, answer, _ = await front.post("/v1/completions", PATHS["/v1/completions"] | {"response_format": wanted})
        assert status == 200, answer


def test_a_schema_too_deep_for_text_is_refused_by_name() -> None:
    deep: Any = {}
    for _ in range(1200):
        deep = {"items": deep}
    wanted = {"type": "json_schema", "json_schema": {"schema": deep}}
    with pytest.raises(InvalidRequest, match="expected a schema that is nested less deeply") as refused:
        parse(ChatBody, PATHS["/v1/chat/completions"] | {"response_format": wanted})
    assert refused.value.param == "response_format.json_schema.schema"


async def test_a_stop_string_ends_a_json_answer_too(front: FrontDoor) -> None:
    front.runtime.say('{"a": 1, "b": 2}')
    body = {"response_format": {"type": "json_object"}, "stop": '"b"', "max_tokens": 40}
    for path, base in PATHS.items():
        _, answer, _ = await front.post(path, base | body)
        text = json.dumps(answer)
        assert "1, " in text
        assert "b" not in text.split("1, ")[1][:4]
        assert '"stop"' in text

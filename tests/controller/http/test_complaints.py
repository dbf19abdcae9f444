"""Whatever a client sends, it is told in our words what is wrong with it, and nothing breaks."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearline.controller.http.schemas import (
    ChatBody,
    CompletionBody,
    FunctionBody,
    JobBody,
    ModelBody,
    ModelPatch,
    parse,
)
from nearline.protocol.errors import InvalidRequest, UnsupportedCheckpoint
from tests.controller.http.conftest import FrontDoor, yarl_raw

T = TypeVar("T")
HI = [{"role": "user", "content": "Hi"}]
MODEL = {"name": "x", "source": "/m"}
PYTHON = re.compile(
    r"\b(str|int|dict|tuple|bytes|NoneType|None|True|False|self|pydantic|Traceback|\w+Error|\w+Exception|\w+Body)\b"
    r"|Input should|instance of|object at 0x|<class|Value error|\[type="
)
"""Words that only Python's or pydantic's own messages hold; what is sent below holds none of them."""

KNOBS = {
    "max_tokens": 4, "min_tokens": 0, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"3": 1.5}, "seed": 3,
    "stop": ["x"], "stop_token_ids": [3], "ignore_eos": True, "stream": False, "n": 1,
    "stream_options": {"include_usage": True}, "response_format": {"type": "text"}, "guided_regex": None,
    "guided_choice": None, "priority": 1, "slo": "batch-1m",
    "ttft_ms": 5000, "tpot_ms": 500, "deadline_ms": 50000, "deadline_s": 50,
}  # fmt: skip
SETTINGS = {
    "keep_alive_s": 5, "keep_alive_min_s": 1, "min_replicas": 0, "max_replicas": 2, "pooling": "last",
    "slo": "interactive", "ttft_ms": 5000, "tpot_ms": 500, "deadline_ms": 5000,
}  # fmt: skip
ROUTES: dict[str, dict[str, Any]] = {
    "POST /v1/functions/tiny/invocations": {"messages": HI, "tools": [{"a": 1}], **KNOBS},
    "POST /v1/chat/completions": {"model": "tiny", "messages": HI, "top_logprobs": 1, "logprobs": True, **KNOBS},
    "POST /v1/completions": {"model": "tiny", "prompt": [[3, 4], [5]], "echo": True, "logprobs": 2, **KNOBS},
    "POST /v1/embeddings": {"model": "tiny", "input": ["a", "b"], "dimensions": 2, "encoding_format": "float"},
    "POST /v1/jobs": {"model": "tiny", "input": {"prompt": "Hi", "max_tokens": 2}, "deadline_s": 60, "max_attempts": 2},
    "POST /admin/models": {**MODEL, "quantize": "int8", "replace": True, **SETTINGS},
    "PATCH /admin/models/tiny": SETTINGS,
    "POST /admin/adapters": {"name": "a", "base": "tiny", "source": "/m", "replace": False},
}
TEXTS = st.text(alphabet=st.characters(codec="utf-8", categories=["Lu", "Nd", "Cc", "Zs", "Sm", "So"]), max_size=100)
NUMBERS = st.sampled_from(
    [0, -1, 1e-300, -1e-300, 1e300, float("nan"), float("inf"), 10**30, 10**400, 2**31, 2**63, 0.5]
)
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.just("x" * 5000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def places(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a body, itself first."""
    yield path
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


def put(body: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    copy = json.loads(json.dumps(body))
    place = copy
    for key in path[:-1]:
        place = place[key]
    change(place, path[-1])
    return copy


@st.composite
def bad_bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    route = draw(st.sampled_from(sorted(ROUTES)))
    body: Any = ROUTES[route]
    path = draw(st.sampled_from(list(places(body))))
    how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "cut"]))
    if how == "add":
        body = {**body, draw(TEXTS): draw(JUNK)}
    elif not path:
        body = draw(JUNK)
    elif how == "remove":
        body = put(body, path, lambda place, key: place.pop(key))
    else:
        junk = draw(JUNK)
        body = put(body, path, lambda place, key: place.__setitem__(key, junk))
    data = json.dumps(body).encode()
    return route, data[: draw(st.integers(0, len(data)))] if how == "cut" else data


def drawn(strategy: st.SearchStrategy[T], num: int) -> list[T]:
    """Examples, for a test that has to await something with each."""
    found: list[T] = []

    @settings(max_examples=num, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(example: T) -> None:
        found.append(example)

    collect()
    return found


class NoImport(dict[str, Any]):
    """Whatever is imported turns out to be no model."""

    def __missing__(self, source: str) -> Any:
        return UnsupportedCheckpoint("this is no model")


async def test_any_bad_body_on_any_route_is_answered_in_our_words(front: FrontDoor) -> None:
    front.runtime.imports = NoImport()
    seen = set()
    for route, data in drawn(bad_bodies(), 500):
        method, path = route.split()
        async with front.session.request(method, front.url + path, data=data) as response:
            answer = json.loads(await response.text())
            told = (route, data[:300], response.status, answer)
            assert response.status < 500, told
            if response.status < 400:
                continue
            error = answer["error"]
            assert not PYTHON.search(error["message"]), told
            assert error["message"].isprintable(), told
            assert len(error["message"]) < 700, told
            if response.status == 400 and error["param"] is not None:
                assert len(error["param"]) < 300, told
                seen.add(error["param"])
    assert len(seen) > 40, "most fields were wrong in some body"


@pytest.mark.parametrize("junk", ["\x1b[2J", "a" * 3000, ":" * 5000, "ünï cödé", "%00", "../..", "tiny%2F"])
async def test_any_bad_path_query_or_header_is_answered_in_our_words(front: FrontDoor, junk: str) -> None:
    name = quote(junk, safe="")
    calls = [
        ("GET", f"/v1/models/{name}", {}), ("GET", f"/v1/jobs/{name}", {}), ("GET", f"/v1/jobs?limit={name}", {}),
        ("GET", f"/v1/jobs?after={name}", {}), ("POST", f"/v1/jobs/{name}/cancel", {}),
        ("POST", f"/v1/functions/{name}/invocations", {}), ("GET", f"/admin/models/{name}", {}),
        ("PATCH", f"/admin/models/{name}", {}), ("DELETE", f"/admin/models/{name}", {}), ("GET", f"/{name}", {}),
        ("GET", f"/admin/adapters/{name}", {}), ("DELETE", f"/admin/adapters/{name}", {}),
        ("POST", f"/admin/adapters/{name}/verify", {}), ("POST", f"/admin/models/{name}/profile", {}),
        ("POST", "/v1/functions/tiny/invocations", {"Invocation-Type": name}),
        ("POST", "/v1/functions/tiny/invocations", {"Invocation-Type": "Event", "Idempotency-Key": name * 200}),
    ]  # fmt: skip
    for method, path, headers in calls:
        data = b'{"prompt": "Hi"}' if method == "POST" else b"{}"
        async with front.session.request(method, yarl_raw(front.url + path), data=data, headers=headers) as response:
            text = await response.text()
            assert 400 <= response.status < 500, (method, path, text)
            message = json.loads(text)["error"]["message"]
            assert not PYTHON.search(message), (method, path, message)
            assert message.isprintable()
            assert len(message) < 400, (method, path, message)


def refusal(cls: Any, body: Any) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        parse(cls, json.dumps(body))
    with pytest.raises(InvalidRequest) as again:
        parse(cls, body)
    assert again.value.message == caught.value.message, "the same body is refused in the same words"
    return caught.value.message, caught.value.param


@pytest.mark.parametrize("number", [1e-300, 0, 1e300, float("nan"), float("inf"), True, "5", 10**400])
@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms", "deadline_ms"])
def test_a_promise_is_a_time_that_somebody_can_mean(name: str, number: Any) -> None:
    message, param = refusal(ModelPatch, {name: number})
    assert (param, "milliseconds from " in message) == (name, True)
    assert parse(ModelPatch, {name: 250.0})


@pytest.mark.parametrize(
    ("cls", "body", "said"),
    [
        (ModelPatch, {"deadline_ms": 1e-300},
         "deadline_ms: expected a number of milliseconds from 1 to 1,000,000,000, got 1e-300"),
        (ModelPatch, {"min_replicas": True}, "min_replicas: expected a whole number from 0 to 1,000, got true"),
        (ModelPatch, {"keep_alive_s": 1e-9},
         "keep_alive_s: expected -1 (for ever), 0 (not at all) or a number of seconds from 0.001 to 1,000,000,000,"
         " got 1e-09"),
        (FunctionBody, {"prompt": "x", "n": True}, "n: expected 1, got true"),
        (FunctionBody, {"prompt": "x", "logit_bias": {"3": "a"}},
         "logit_bias.3: expected a number from -100 to 100, got 'a'"),
        (FunctionBody, {"prompt": 3}, "prompt: expected text or a list, got 3"),
        (CompletionBody, {"model": "m", "prompt": [1, "a"]}, "prompt.1: expected a whole number or a list, got 'a'"),
        (CompletionBody, {"model": "m", "prompt": [[1], ["a"]]}, "prompt.1.0: expected a whole number, got 'a'"),
        (ChatBody, {"model": "m", "messages": [{}]}, "messages.0.role: it is missing; expected 'system', 'developer'"),
        (ChatBody, {"messages": HI}, "model: it is missing; expected text"),
        (ModelBody, {"name": "a"}, "source: it is missing; expected text"),
        (ChatBody, {"model": "m", "messages": []}, "expected a list with at least one entry, got an empty list"),
        (JobBody, {"model": "m", "input": [1]}, "input: expected an object, got a list"),
        (JobBody, {"model": "m", "input": {}, "endpoint": "x" * 100}, "(100 characters)"),
    ],
)  # fmt: skip
def test_a_refusal_says_where_what_came_and_what_would_do(cls: Any, body: Any, said: str) -> None:
    assert said in refusal(cls, body)[0]

"""Chat completions as openai-python and a plain socket see them."""

import asyncio
import json
from typing import Any

import openai
import pytest

from nearline.protocol.errors import InstanceFailed, Overloaded
from tests.controller.http.conftest import CONTEXT, FrontDoor, until
from tests.controller.http.scripted import EOS

HI = [{"role": "user", "content": "Hi"}]
PATH = "/v1/chat/completions"


def client_of(front: FrontDoor, max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=max_retries)


async def test_openai_python_reads_a_whole_answer(front: FrontDoor) -> None:
    async with client_of(front) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HI, seed=7)
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    (handle,) = front.runtime.handles
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    num_special, num_bytes = 3, len("user\nHi\nassistant\n")
    assert answer.usage.prompt_tokens == len(handle.request.prompt_token_ids) == num_special + num_bytes
    assert answer.usage.completion_tokens == len("Hello, world!") + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert handle.request.sampling.seed == 7
    text = await front.door.texts.get(front.door.registry.models["tiny"].checkpoint)
    assert await text.vocabulary.encode(prompt, add_special=False) == handle.request.prompt_token_ids


async def test_a_stream_says_the_same_as_a_whole_answer(front: FrontDoor) -> None:
    front.runtime.say("ďe 👋 漢字 bye", EOS)
    async with client_of(front) as client:
        whole = await client.chat.completions.create(model="tiny", messages=HI)
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content == "ďe 👋 漢字 bye"
    assert not any("\ufffd" in piece for piece in pieces)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1


async def test_usage_comes_in_a_last_chunk_without_choices_only_when_asked(front: FrontDoor) -> None:
    body = {"model": "tiny", "messages": HI, "stream": True}
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        frames = await front.events(PATH, body | options)
        assert all("usage" not in frame for frame in frames[:-1])
    frames = await front.events(PATH, body | {"stream_options": {"include_usage": True}})
    assert frames[-1] == "[DONE]"
    assert frames[-2]["choices"] == []
    assert frames[-2]["usage"]["completion_tokens"] == 14
    assert all(frame["usage"] is None for frame in frames[:-2])


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_stop_string_over_many_tokens_never_shows(front: FrontDoor, is_streaming: bool) -> None:
    front.runtime.say("abc DEFGHIJ and more")
    body = {"model": "tiny", "messages": HI, "stop": ["DEFGHIJ", "zz"], "stream": is_streaming}
    if is_streaming:
        frames = await front.events(PATH, body)
        text = "".join(f["choices"][0]["delta"].get("content", "") for f in frames[:-1])
        reason = frames[-2]["choices"][0]["finish_reason"]
    else:
        _, answer, _ = await front.post(PATH, body)
        text, reason = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
        assert answer["usage"]["completion_tokens"] == len("abc DEFGHIJ")
    assert (text, reason) == ("abc ", "stop")
    assert front.runtime.handles[0].is_cancelled


async def test_choices_differ_by_seed_and_share_the_prompt(front: FrontDoor) -> None:
    async with client_of(front) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HI, n=3, seed=5, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert [handle.request.sampling.seed for handle in front.runtime.handles] == [5, 6, 7]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == len(front.runtime.handles[0].request.prompt_token_ids)
    frames = await front.events(PATH, {"model": "tiny", "messages": HI, "n": 2, "stream": True})
    ends = [f["choices"][0]["index"] for f in frames[:-1] if f["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1]


async def test_logprobs_carry_bytes_and_alternatives(front: FrontDoor) -> None:
    front.runtime.say("é!", EOS)
    async with client_of(front) as client:
        options: Any = {"logprobs": True, "top_logprobs": 2}
        answer = await client.chat.completions.create(model="tiny", messages=HI, **options)
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True, **options)
        streamed = [token for c in [c async for c in stream] if c.choices[0].logprobs
                    for token in c.choices[0].logprobs.content or []]  # fmt: skip
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert b"".join(bytes(token.bytes or []) for token in content) == "é!".encode()
    assert [len(token.top_logprobs) for token in content] == [2, 2, 2]
    assert [token.bytes for token in streamed] == [token.bytes for token in content]


async def test_generation_that_ends_inside_a_character_flushes_a_replacement_at_the_end(front: FrontDoor) -> None:
    front.runtime.say("ab👋")
    _, answer, _ = await front.post(PATH, {"model": "tiny", "messages": HI, "max_tokens": 4})
    assert answer["choices"][0]["message"]["content"] == "ab\ufffd"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_failure_in_the_middle_is_one_error_frame_that_openai_python_raises(front: FrontDoor) -> None:
    front.runtime.break_at = (3, InstanceFailed("the instance died"))
    async with client_of(front) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="the instance died"):
            [chunk async for chunk in stream]
    frames = await front.events(PATH, {"model": "tiny", "messages": HI, "stream": True})
    assert frames[-1]["error"]["code"] == "instance_failed"


async def test_a_refusal_says_whether_and_when_to_try_again(front: FrontDoor) -> None:
    front.runtime.refusal = Overloaded("too many requests wait", retry_after_s=3)
    for is_streaming in (False, True):
        status, body, headers = await front.post(PATH, {"model": "tiny", "messages": HI, "stream": is_streaming})
        assert (status, headers["Retry-After"], headers["x-should-retry"]) == (429, "3", "true")
        assert body["error"]["code"] == "overloaded"


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_prompt_that_leaves_no_room_is_refused_before_headers(front: FrontDoor, is_streaming: bool) -> None:
    text = "x" * CONTEXT
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": is_streaming}
    status, answer, _ = await front.post(PATH, body)
    num_tokens = CONTEXT + len("user\n\nassistant\n") + 3
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["param"] == "messages"
    assert str(num_tokens) in answer["error"]["message"]
    assert str(CONTEXT) in answer["error"]["message"]


async def test_a_held_stream_answers_at_once_and_shows_signs_of_life(front: FrontDoor) -> None:
    front.runtime.gate.clear()
    body = {"model": "tiny", "messages": HI, "stream": True}
    async with front.session.post(front.url + PATH, json=body) as response:
        assert response.status == 200
        seen = b""
        async with asyncio.timeout(60):
            while seen.count(b": waiting") < 3:
                seen += await response.content.readany()
        front.runtime.gate.set()
        seen += await response.content.read()
    assert b"data: [DONE]" in seen


async def test_the_first_token_leaves_before_the_second_exists(front: FrontDoor) -> None:
    front.runtime.step_s = 1.0
    async with front.session.post(front.url + PATH, json={"model": "tiny", "messages": HI, "stream": True}) as response:
        seen = b""
        while b'"content":"H"' not in seen:
            seen += await response.content.readany()
        assert front.runtime.handles[0].num_sent == 1


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("is_held", [False, True])
async def test_a_client_that_hangs_up_frees_its_request(front: FrontDoor, is_streaming: bool, is_held: bool) -> None:
    front.runtime.step_s = 0.05
    front.runtime.say("x" * 60)
    if is_held:
        front.runtime.gate.clear()
    body = json.dumps({"model": "tiny", "messages": HI, "stream": is_streaming})
    host, port = front.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = "Host: localhost\r\nContent-Type: application/json"
    writer.write(f"POST {PATH} HTTP/1.1\r\n{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    handles, value = front.runtime.handles, front.door.metrics.registry.get_sample_value
    await until(lambda: bool(handles) and (is_held or handles[0].num_sent > 0))
    writer.close()
    await until(lambda: handles[0].is_cancelled)
    await until(lambda: not value("nearline_http_requests_in_flight"))
    assert value("nearline_request_failures_total", {"model_name": "tiny", "code": "cancelled"}) == 1

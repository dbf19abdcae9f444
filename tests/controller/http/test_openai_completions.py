"""Text completions: every form of prompt, echo, stop, logprobs, limits."""

from typing import Any

import openai
import pytest

from tests.controller.http.conftest import CONTEXT, FrontDoor
from tests.controller.http.scripted import EOS, text_ids

PATH = "/v1/completions"


async def test_openai_python_reads_a_completion_and_a_stream_of_it(front: FrontDoor) -> None:
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.completions.create(model="tiny", prompt="Say", max_tokens=20)
        stream = await client.completions.create(model="tiny", prompt="Say", max_tokens=20, stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
    assert whole.choices[0].text == "".join(pieces) == "Hello, world!"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 3


async def test_a_prompt_may_be_text_or_ids_or_lists_of_either(front: FrontDoor) -> None:
    ids = text_ids("abc", front.runtime.files)
    for prompt, seen in (
        ("abc", [ids]),
        (["abc", "abcabc"], [ids, ids + ids]),
        (ids, [ids]),
        ([ids, ids[:1]], [ids, ids[:1]]),
    ):
        front.runtime.handles.clear()
        status, answer, _ = await front.post(PATH, {"model": "tiny", "prompt": prompt, "n": 2, "max_tokens": 2})
        assert status == 200, answer
        expected = [tuple(p) for p in seen for _ in range(2)]
        assert [handle.request.prompt_token_ids for handle in front.runtime.handles] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, seen))


async def test_an_empty_prompt_begins_with_the_beginning_of_text(front: FrontDoor) -> None:
    for prompt in ("", None, []):
        front.runtime.handles.clear()
        status, answer, _ = await front.post(PATH, {"model": "tiny", "prompt": prompt})
        if prompt == []:
            assert (status, answer["error"]["param"]) == (400, "prompt")
        else:
            assert front.runtime.handles[0].request.prompt_token_ids == (256,)


@pytest.mark.parametrize("prompt", [[5, 272], [5, -1], [[1], [300]]])
async def test_ids_outside_the_vocabulary_are_refused(front: FrontDoor, prompt: Any) -> None:
    status, answer, _ = await front.post(PATH, {"model": "tiny", "prompt": prompt})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert "272" in answer["error"]["message"]
    assert not front.runtime.handles


async def test_the_last_place_of_the_context_is_usable_and_the_next_is_not(front: FrontDoor) -> None:
    front.runtime.say("x" * 90)
    body = {"model": "tiny", "max_tokens": 100_000}
    status, answer, _ = await front.post(PATH, body | {"prompt": "p" * (CONTEXT - 1)})
    assert (status, answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (200, "x", "length")
    status, answer, _ = await front.post(PATH, body | {"prompt": "p" * CONTEXT})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "prompt")


async def test_a_large_max_tokens_is_clamped_to_the_context(front: FrontDoor) -> None:
    front.runtime.say("x" * 90)
    _, answer, _ = await front.post(PATH, {"model": "tiny", "prompt": "p" * 10, "max_tokens": 100_000})
    assert answer["usage"]["completion_tokens"] == CONTEXT - 10
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_zero_tokens_are_an_empty_answer_that_reaches_no_instance(front: FrontDoor) -> None:
    _, answer, _ = await front.post(PATH, {"model": "tiny", "prompt": "abc", "max_tokens": 0, "echo": True})
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert not front.runtime.handles


async def test_echo_puts_the_prompt_in_front_streamed_or_not(front: FrontDoor) -> None:
    body = {"model": "tiny", "prompt": "Well. ", "max_tokens": 5, "echo": True}
    _, answer, _ = await front.post(PATH, body)
    frames = await front.events(PATH, body | {"stream": True})
    assert answer["choices"][0]["text"] == "".join(f["choices"][0]["text"] for f in frames[:-1]) == "Well. Hello"


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
async def test_echo_with_logprobs_scores_the_prompt_as_lm_eval_reads_it(front: FrontDoor, max_tokens: int) -> None:
    ids = text_ids("hé!", front.runtime.files)
    body = {"model": "tiny", "prompt": [ids, "ab"], "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    status, answer, _ = await front.post(PATH, body)
    assert status == 400, "ids and text do not mix"
    _, answer, _ = await front.post(PATH, body | {"prompt": [ids, ids[:1]]})
    first, second = answer["choices"]
    assert first["text"] == "hé!" + "Hello"[:max_tokens]
    logprobs = first["logprobs"]
    assert logprobs["tokens"] == ["h", "\ufffd", "\ufffd", "!", *"Hello"[:max_tokens]]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0, *[-0.5] * max_tokens]
    assert [top and max(top, key=top.get) for top in logprobs["top_logprobs"][:4]] == [None, "\ufffd", "\ufffd", "!"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, *range(3, 3 + max_tokens)]
    assert second["logprobs"]["token_logprobs"] == [None, *[-0.5] * max_tokens]
    assert first["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens
    assert [h.request.sampling.prompt_logprobs for h in front.runtime.handles] == [1, 1]


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_a_scored_prompt_streams_in_front_of_its_answer(front: FrontDoor, max_tokens: int) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": max_tokens, "echo": True, "logprobs": 0, "n": 2}
    _, whole, _ = await front.post(PATH, body)
    frames = await front.events(PATH, body | {"stream": True})
    for index in range(2):
        parts = [c for f in frames[:-1] for c in f["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in parts) == whole["choices"][index]["text"] == "abc" + "He"[:max_tokens]
        for name, expected in whole["choices"][index]["logprobs"].items():
            assert [item for c in parts for item in c["logprobs"][name]] == expected


async def test_a_prompt_that_fills_the_context_can_be_scored_but_not_continued(front: FrontDoor) -> None:
    body = {"model": "tiny", "prompt": [5] * CONTEXT, "echo": True, "logprobs": 0}
    status, answer, _ = await front.post(PATH, body | {"max_tokens": 0})
    assert (status, len(answer["choices"][0]["logprobs"]["tokens"])) == (200, CONTEXT)
    status, answer, _ = await front.post(PATH, body | {"max_tokens": 1})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_stop_strings_and_ids_end_the_text_without_showing(front: FrontDoor) -> None:
    (bang,) = text_ids("!", front.runtime.files)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 30}
    for stop in ("lo, w", ["zzz", "lo, w"]):
        _, answer, _ = await front.post(PATH, body | {"stop": stop})
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("Hel", "stop")
    await front.post(PATH, body | {"stop_token_ids": [bang]})
    assert front.runtime.handles[-1].request.sampling.stop_token_ids == (bang,)


async def test_ignore_eos_runs_on_and_shows_no_special_token(front: FrontDoor) -> None:
    front.runtime.say("ab", EOS, EOS, *text_ids("cd", front.runtime.files))
    _, answer, _ = await front.post(PATH, {"model": "tiny", "prompt": "a", "max_tokens": 5, "ignore_eos": True})
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("abc", 5)


async def test_logprobs_are_four_parallel_lists(front: FrontDoor) -> None:
    _, answer, _ = await front.post(PATH, {"model": "tiny", "prompt": "a", "max_tokens": 3, "logprobs": 2})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["H", "e", "l"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]


GOOD: list[dict[str, Any]] = [
    {"top_p": 0}, {"top_p": 1.0}, {"top_p": 1}, {"temperature": 0}, {"temperature": 2}, {"presence_penalty": -2},
    {"frequency_penalty": 2}, {"n": 1}, {"n": 128}, {"seed": -1}, {"seed": 2**63 - 1}, {"stop": None}, {"stop": []},
    {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "whatever": 1}, {"top_k": -1}, {"min_p": 0.5},
    {"logit_bias": {"5": -100, "6": 1.5}}, {"repetition_penalty": 1.2}, {"stream_options": {"include_usage": True}},
]  # fmt: skip
BAD: list[tuple[str, Any]] = [
    ("top_p", 1.01), ("top_p", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True),
    ("presence_penalty", 3), ("n", 0), ("n", 129), ("seed", 2**63), ("stop", ""), ("stop", ["a"] * 17), ("stop", 3),
    ("max_tokens", -1), ("max_tokens", 1.5), ("logprobs", 21), ("logit_bias", {"x": 1}), ("logit_bias", {"272": 1}),
    ("logit_bias", {"1": 101}), ("min_tokens", 99), ("stop_token_ids", [999]), ("best_of", 3), ("suffix", "x"),
    ("repetition_penalty", 0), ("top_k", -2), ("stream", "yes"), ("prompt", [1, "a"]), ("prompt", 5),
]  # fmt: skip


@pytest.mark.parametrize("options", GOOD)
async def test_values_at_the_edge_are_accepted(front: FrontDoor, options: dict[str, Any]) -> None:
    status, answer, _ = await front.post(PATH, {"model": "tiny", "prompt": "a", "max_tokens": 1} | options)
    assert status == 200, answer


@pytest.mark.parametrize(("name", "value"), BAD)
async def test_values_over_the_edge_are_refused_by_name(front: FrontDoor, name: str, value: Any) -> None:
    status, answer, headers = await front.post(PATH, {"model": "tiny", "prompt": "a", "max_tokens": 4, name: value})
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert (answer["error"]["param"] or "").startswith(name)
    assert headers["x-should-retry"] == "false"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
async def test_numbers_that_are_none_are_refused(front: FrontDoor, number: str) -> None:
    status, answer, _ = await front.post(PATH, f'{{"model": "tiny", "prompt": "a", "temperature": {number}}}')
    assert (status, answer["error"]["param"]) == (400, "temperature")


async def test_a_zero_top_p_is_greedy(front: FrontDoor) -> None:
    await front.post(PATH, {"model": "tiny", "prompt": "a", "top_p": 0, "temperature": 1})
    assert front.runtime.handles[0].request.sampling.temperature == 0

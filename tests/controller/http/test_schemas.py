"""Bodies: no number that a frame cannot hold, no misspelt field that silently changes nothing."""

import json
from typing import Any

import pytest

from nearline.controller.http.schemas import ChatBody, CompletionBody, FunctionBody, ModelBody, parse
from nearline.protocol.errors import InvalidRequest
from tests.controller.http.conftest import FrontDoor
from tests.controller.http.scripted import EOS

PATH = "/v1/functions/tiny/invocations"
HI = [{"role": "user", "content": "Hi"}]
HUGE = ("1" + "0" * 20, "1e20", "1" + "0" * 400, "1" + "0" * 5000, "1e308", "-1" + "0" * 20)
SAMPLING = (
    "max_tokens", "min_tokens", "top_k", "seed", "priority", "n", "temperature", "top_p", "min_p", "ttft_ms", "tpot_ms",
    "deadline_s", "deadline_ms", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("number", HUGE)
def test_no_endpoint_takes_a_number_beyond_what_frames_and_clocks_hold(name: str, number: str) -> None:
    for cls, head in (
        (FunctionBody, '"prompt": "x"'),
        (CompletionBody, '"model": "m", "prompt": "x"'),
        (ChatBody, f'"model": "m", "messages": {json.dumps(HI)}'),
    ):
        with pytest.raises(InvalidRequest):
            parse(cls, f'{{{head}, "{name}": {number}}}')


@pytest.mark.parametrize("keep_alive_s", [-2.0, -0.5, 1e10, 1e308, float("inf"), float("nan")])
def test_a_keep_alive_is_a_time_or_for_ever(keep_alive_s: float) -> None:
    with pytest.raises(InvalidRequest, match="keep_alive_s"):
        parse(ModelBody, {"name": "a", "source": "/a", "keep_alive_s": keep_alive_s})
    for good in (-1.0, 0.0, 1e9):
        assert parse(ModelBody, {"name": "a", "source": "/a", "keep_alive_s": good}).keep_alive_s == good


async def test_ids_and_limits_of_thousands_of_digits_are_refused(front: FrontDoor) -> None:
    status, answer, _ = await front.post(PATH, {"prompt": "Hi", "logit_bias": {"9" * 5000: 1}})
    assert (status, answer["error"]["param"]) == (400, "logit_bias")
    status, answer, _ = await front.get("/v1/jobs?limit=" + "9" * 5000)
    assert (status, answer["error"]["param"]) == (400, "limit")


@pytest.mark.parametrize("recommended", [10**400, float("nan"), float("inf"), -(10**30)])
async def test_an_absurd_recommendation_of_a_model_counts_as_none(
    front: FrontDoor, files: dict[str, bytes], recommended: Any
) -> None:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    target = front.door.registry.resolve("tiny")
    text = await front.door.texts.get(target.model.checkpoint, None)
    text.defaults.update(dict.fromkeys(names, recommended))
    assert (await front.post(PATH, {"prompt": "Hi"}))[0] == 200
    sampling = front.runtime.handles[-1].request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 0, 1.0)


@pytest.mark.parametrize(
    ("path", "body", "near"),
    [
        (PATH, {"prompt": "Hi", "temprature": 0.5}, "temperature"),
        (PATH, {"prompt": "Hi", "max-tokens": 5}, "max_tokens"),
        (PATH, {"promt": "Hi"}, "prompt"),
        ("/v1/jobs", {"model": "tiny", "input": {"prompt": "Hi"}, "deadlin_s": 5}, "deadline_s"),
        ("/v1/jobs", {"model": "tiny", "input": {"prompt": "Hi", "max_token": 5}}, "max_tokens"),
        ("/admin/models", {"name": "x", "source": "/m", "keepalive_s": 5}, "keep_alive_s"),
        ("/admin/adapters", {"name": "x", "base": "tiny", "sorce": "/m", "source": "/m"}, "source"),
    ],
)
async def test_our_own_api_refuses_a_field_it_does_not_know_and_names_a_near_one(
    front: FrontDoor, path: str, body: dict[str, Any], near: str
) -> None:
    status, answer, _ = await front.post(path, body)
    assert status == 400
    assert f"did you mean '{near}'?" in answer["error"]["message"]
    assert answer["error"]["param"] not in (None, near)
    assert front.runtime.handles == []


async def test_a_field_without_a_neighbour_is_answered_with_the_known_ones(front: FrontDoor) -> None:
    _, answer, _ = await front.post(PATH, {"prompt": "Hi", "zzzzzzz": 1})
    assert "max_tokens, messages, min_p" in answer["error"]["message"]


async def test_openai_routes_ignore_what_they_do_not_know(front: FrontDoor) -> None:
    for path, body in (
        ("/v1/chat/completions", {"model": "tiny", "messages": HI}),
        ("/v1/completions", {"model": "tiny", "prompt": "Hi"}),
        ("/v1/embeddings", {"model": "tiny", "input": "Hi"}),
    ):
        assert (await front.post(path, {**body, "store": True, "metadata": {}}))[0] == 200


async def test_functions_are_greedy_unless_the_request_or_the_model_says_otherwise(front: FrontDoor) -> None:
    async def temperature_of(path: str, **body: Any) -> float:
        assert (await front.post(path, body))[0] == 200
        return front.runtime.handles[-1].request.sampling.temperature

    assert await temperature_of(PATH, prompt="Hi") == 0.0
    assert await temperature_of(PATH, prompt="Hi", temperature=0.7) == 0.7
    assert await temperature_of("/v1/completions", model="tiny", prompt="Hi") == 1.0
    assert await temperature_of("/v1/chat/completions", model="tiny", messages=HI) == 1.0
    target = front.door.registry.resolve("tiny")
    text = await front.door.texts.get(target.model.checkpoint, None)
    text.defaults["do_sample"] = True
    assert await temperature_of(PATH, prompt="Hi") == 1.0
    text.defaults["temperature"] = 0.3
    assert await temperature_of(PATH, prompt="Hi") == 0.3


async def test_a_job_of_an_older_controller_still_runs(front: FrontDoor) -> None:
    """It was stored with the name of its model among its fields."""
    from nearline.controller.durable.jobs import JobRequest
    from nearline.protocol import TenantId

    front.runtime.say("ok", EOS)
    body = {"prompt": "Hi", "model": "tiny", "stream": False}
    asked = JobRequest(TenantId("default"), "function", "tiny", body, 60.0)
    job = await front.door.jobs.wait(await front.door.jobs.submit(asked), TenantId("default"), 5.0)
    assert job.result is not None
    assert job.result["output"]["text"] == "ok"


@pytest.mark.parametrize("source", ["/m\0odel", "/m\nodel", "/m\x1b[2Jodel", "x" * 4097, "x" * 100_000, ""])
async def test_a_source_is_one_line_of_bounded_text(front: FrontDoor, source: str) -> None:
    for path, body in (("/admin/models", {"name": "x"}), ("/admin/adapters", {"name": "x", "base": "tiny"})):
        status, answer, _ = await front.post(path, {**body, "source": source})
        assert (status, answer["error"]["param"]) == (400, "source")
        assert len(answer["error"]["message"]) < 300
        assert "Value error" not in answer["error"]["message"]
    assert front.runtime.closed_imports == []

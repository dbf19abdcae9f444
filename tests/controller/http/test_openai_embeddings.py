"""Embeddings: every form of input and both encodings, as openai-python reads them; the scripted vectors are known."""

import asyncio
import base64
import math
import struct
from typing import Any

import openai
import pytest

from nearline.protocol import Pooling
from nearline.protocol.errors import InstanceFailed
from tests.controller.http.conftest import CONTEXT, FrontDoor, until
from tests.controller.http.scripted import text_ids

PATH = "/v1/embeddings"


def unit(*values: float) -> Any:
    norm = math.sqrt(sum(value * value for value in values))
    return pytest.approx([value / norm for value in values], abs=1e-6)


async def test_openai_python_reads_both_encodings_as_the_same_float32(front: FrontDoor) -> None:
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        default = await client.embeddings.create(model="tiny", input=["abc", "b"])
        floats = await client.embeddings.create(model="tiny", input=["abc", "b"], encoding_format="float")
    _, packed, _ = await front.post(PATH, {"model": "tiny", "input": ["abc", "b"], "encoding_format": "base64"})
    for index, row in enumerate(packed["data"]):
        decoded = struct.unpack("<4f", base64.b64decode(row["embedding"]))
        assert list(decoded) == floats.data[index].embedding == default.data[index].embedding
        assert row["index"] == index
    assert (floats.usage.prompt_tokens, floats.usage.total_tokens) == (4, 4)


async def test_an_input_may_be_text_or_ids_or_lists_of_either(front: FrontDoor) -> None:
    ids = text_ids("abc", front.runtime.files)
    for given, seen in (("abc", [ids]), (["abc", "c"], [ids, ids[2:]]), (ids, [ids]), ([ids, ids[:1]], [ids, ids[:1]])):
        front.runtime.handles.clear()
        status, answer, _ = await front.post(PATH, {"model": "tiny", "input": given})
        assert status == 200, answer
        assert [list(handle.request.prompt_token_ids) for handle in front.runtime.handles] == seen
        assert [row["embedding"] for row in answer["data"]] == [unit(len(one), one[-1], 4, 0.5) for one in seen]


async def test_dimensions_are_cut_and_made_of_length_one_again(front: FrontDoor) -> None:
    body = {"model": "tiny", "input": [9, 8]}
    _, answer, _ = await front.post(PATH, body | {"dimensions": 2})
    assert answer["data"][0]["embedding"] == unit(2, 8)
    status, answer, _ = await front.post(PATH, body | {"dimensions": 5})
    assert (status, answer["error"]["param"]) == (400, "dimensions")
    assert "4 dimensions" in answer["error"]["message"]


async def test_pooling_is_the_requests_else_the_models(front: FrontDoor) -> None:
    await front.post(PATH, {"model": "tiny", "input": "a"})
    await front.post(PATH, {"model": "acme/pirate", "input": "a", "pooling": "mean", "priority": 7})
    first, second = [handle.request for handle in front.runtime.handles]
    assert (first.pooling, first.adapter_id, first.sampling.max_tokens) == (Pooling.LAST, None, 0)
    assert (second.pooling, second.adapter_id, second.priority) == (Pooling.MEAN, "acme/pirate", 7)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"), ({"input": ["a", ""]}, "input"), ({"input": []}, "input"), ({"input": [[]]}, "input"),
        ({"input": [1, 272]}, "input"), ({"input": [[1], [-1]]}, "input"), ({"input": ["a", 1]}, "input"),
        ({"input": ["a"] * 2049}, "input"), ({"input": [5] * (CONTEXT + 1)}, "input"),
        ({"input": "x" * (CONTEXT + 1)}, "input"), ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"), ({"pooling": "max"}, "pooling"),
        ({"input": None}, "input"), ({"model": "nobody"}, "model"),
    ],
)  # fmt: skip
async def test_what_cannot_be_embedded_is_refused_by_name(front: FrontDoor, fields: dict[str, Any], param: str) -> None:
    status, answer, _ = await front.post(PATH, {"model": "tiny", "input": "a"} | fields)
    assert status == (404 if param == "model" else 400)
    assert (answer["error"]["param"] or "").startswith(param)
    assert not front.runtime.handles


async def test_a_text_as_long_as_the_context_is_embedded(front: FrontDoor) -> None:
    status, _, _ = await front.post(PATH, {"model": "tiny", "input": "x" * CONTEXT})
    assert status == 200


async def test_two_thousand_inputs_go_a_few_at_a_time_and_come_back_in_order(front: FrontDoor) -> None:
    given = [[1 + i % 50] * (1 + i % 7) for i in range(2048)]
    status, answer, _ = await front.post(PATH, {"model": "tiny", "input": given})
    assert status == 200
    assert [row["index"] for row in answer["data"]] == list(range(2048))
    for row, ids in zip(answer["data"][::97], given[::97], strict=True):
        assert row["embedding"] == unit(len(ids), ids[-1], 4, 0.5)


async def test_one_failure_or_a_client_that_leaves_cancels_what_runs_and_starts_no_more(front: FrontDoor) -> None:
    front.runtime.break_at, front.runtime.step_s = (0, InstanceFailed("the instance is gone")), 0.02
    status, answer, _ = await front.post(PATH, {"model": "tiny", "input": ["a"] * 200})
    assert (status, answer["error"]["code"]) == (500, "instance_failed")
    assert len(front.runtime.handles) < 200
    front.runtime.break_at = None
    front.runtime.gate.clear()
    front.runtime.handles.clear()
    leaving = asyncio.create_task(front.post(PATH, {"model": "tiny", "input": ["a"] * 200}))
    await until(lambda: len(front.runtime.handles) == 64)
    leaving.cancel()
    await until(lambda: all(handle.is_cancelled for handle in front.runtime.handles))
    assert len(front.runtime.handles) == 64


async def test_a_job_may_embed(front: FrontDoor) -> None:
    body = {"model": "tiny", "endpoint": "/v1/embeddings", "input": {"input": [[3, 4]]}}
    status, job, _ = await front.post("/v1/jobs", body, Prefer="wait=60")
    assert (status, job["status"]) == (200, "succeeded"), job
    assert job["output"]["data"][0]["embedding"] == unit(2, 4, 4, 0.5)
    status, answer, _ = await front.post("/v1/jobs", body | {"input": {"input": []}})
    assert (status, answer["error"]["param"]) == (400, "input")

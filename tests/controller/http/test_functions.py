"""Functions and jobs: called at once, later, or only checked."""

import asyncio
from typing import Any

import pytest

from nearline.protocol.errors import InstanceFailed
from tests.controller.http.conftest import FrontDoor, until
from tests.controller.http.scripted import EOS

PATH = "/v1/functions/tiny/invocations"
HI = [{"role": "user", "content": "Hi"}]


async def test_an_invocation_answers_with_text_usage_and_waterfall(front: FrontDoor) -> None:
    for body in ({"prompt": "Hi"}, {"messages": HI}):
        status, answer, headers = await front.post(PATH, body, X_Request_Id="mine-1")
        assert status == 200
        assert headers["x-request-id"] == "mine-1"
        assert answer["model"] == "tiny"
        assert answer["output"] == {"text": "Hello, world!", "finish_reason": "stop"}
        assert answer["usage"]["completion_tokens"] == 14
        assert answer["timings"]["queued_s"] == 0.001


async def test_a_streamed_invocation_ends_with_reason_usage_and_waterfall(front: FrontDoor) -> None:
    front.runtime.say("a STOP b")
    frames = await front.events(PATH, {"prompt": "Hi", "stream": True, "stop": "STOP"})
    assert frames[-1] == "[DONE]"
    assert "".join(frame.get("delta", "") for frame in frames[:-1]) == "a "
    assert frames[-2]["finish_reason"] == "stop"
    assert {"usage", "timings", "id"} <= frames[-2].keys()


@pytest.mark.parametrize("name", ["org/tiny:v1", "org%2Ftiny:v1", "org%2Ftiny%3Av1", "acme/pirate", "tiny:acme/pirate"])
async def test_names_with_slashes_and_colons_work_raw_and_encoded(front: FrontDoor, name: str) -> None:
    from yarl import URL

    url = URL(f"{front.url}/v1/functions/{name}/invocations", encoded=True)
    async with front.session.post(url, json={"prompt": "Hi"}) as response:
        assert response.status == 200
        answer = await response.json()
    request = front.runtime.handles[0].request
    is_adapter = "pirate" in name
    assert (request.adapter_id, request.adapter_digest) == (("acme/pirate", "a0") if is_adapter else (None, None))
    assert request.model_id == ("tiny" if is_adapter else "org/tiny:v1")
    assert answer["model"] == name.replace("%2F", "/").replace("%3A", ":")


@pytest.mark.parametrize("name", ["nobody", "tiny:nobody", "org/tiny:v1:acme/pirate", "acme"])
async def test_unknown_names_never_fall_back_to_a_base(front: FrontDoor, name: str) -> None:
    for path, body in (
        (f"/v1/functions/{name}/invocations", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"model": name, "messages": HI}),
        ("/v1/completions", {"model": name, "prompt": "Hi"}),
        ("/v1/jobs", {"model": name, "input": {"prompt": "Hi"}}),
    ):
        status, answer, _ = await front.post(path, body)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert not front.runtime.handles


async def test_a_dry_run_checks_and_runs_nothing(front: FrontDoor) -> None:
    assert (await front.post(PATH, {"prompt": "Hi"}, Invocation_Type="DryRun"))[:2] == (204, None)
    status, answer, _ = await front.post(PATH, {"prompt": "x" * 99}, Invocation_Type="DryRun")
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert (await front.post(PATH, {"prompt": "Hi"}, Invocation_Type="Soon"))[0] == 400
    assert not front.runtime.handles


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HI}, {"messages": []}, {"prompt": "a", "n": 2}])
async def test_an_invocation_takes_one_prompt(front: FrontDoor, body: dict[str, Any]) -> None:
    assert (await front.post(PATH, body))[0] == 400


@pytest.mark.parametrize("headers", [{"Invocation_Type": "Event"}, {"Prefer": "respond-async"}])
async def test_an_event_becomes_a_job_that_can_be_waited_for(front: FrontDoor, headers: dict[str, str]) -> None:
    status, job, answered = await front.post(PATH, {"prompt": "Hi", "stream": True}, **headers)
    assert status == 202
    assert job["status"] in ("queued", "starting", "running")
    assert answered["Location"] == job["urls"]["get"] == f"/v1/jobs/{job['id']}"
    status, job, _ = await front.get(answered["Location"], Prefer="wait=60")
    assert (status, job["status"]) == (200, "succeeded")
    assert job["output"] == {"text": "Hello, world!", "finish_reason": "stop"}
    assert job["usage"]["completion_tokens"] == 14
    assert (job["attempts"], job["error"]) == (1, None)
    assert job["created_at"] <= job["started_at"] <= job["completed_at"]


async def test_an_invalid_event_is_refused_at_once(front: FrontDoor) -> None:
    status, answer, _ = await front.post(PATH, {"prompt": "Hi", "temperature": 9}, Invocation_Type="Event")
    assert (status, answer["error"]["param"]) == (400, "temperature")


async def test_jobs_run_openai_bodies_too(front: FrontDoor) -> None:
    for endpoint, given in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 20}),
    ):
        body = {"model": "tiny", "endpoint": endpoint, "input": given}
        status, job, _ = await front.post("/v1/jobs", body, Prefer="wait=60")
        assert (status, job["status"]) == (200, "succeeded")
        assert job["output"]["choices"][0]["finish_reason"] == "stop"


async def test_an_idempotency_key_gives_one_job_and_refuses_another_body(front: FrontDoor) -> None:
    send = [front.post(PATH, {"prompt": "Hi"}, Invocation_Type="Event", Idempotency_Key="k1") for _ in range(8)]
    answers = await asyncio.gather(*send)
    assert len({job["id"] for _, job, _ in answers}) == 1
    job_id = answers[0][1]["id"]
    await front.get(f"/v1/jobs/{job_id}", Prefer="wait=60")
    status, again, _ = await front.post(PATH, {"prompt": "Hi"}, Invocation_Type="Event", Idempotency_Key="k1")
    assert (status, again["id"], again["status"]) == (200, job_id, "succeeded")
    status, answer, _ = await front.post(PATH, {"prompt": "Ho"}, Invocation_Type="Event", Idempotency_Key="k1")
    assert (status, answer["error"]["code"]) == (422, "idempotency_mismatch")
    assert len(front.runtime.handles) == 1


async def test_a_running_job_is_cancelled_in_the_fleet_and_stays_cancelled(front: FrontDoor) -> None:
    front.runtime.gate.clear()
    _, job, _ = await front.post(PATH, {"prompt": "Hi"}, Invocation_Type="Event")
    await until(lambda: bool(front.runtime.handles))
    waiting = asyncio.create_task(front.get(f"/v1/jobs/{job['id']}", Prefer="wait=20"))
    _, cancelled, _ = await front.post(f"/v1/jobs/{job['id']}/cancel", {})
    assert cancelled["status"] == "canceled"
    async with asyncio.timeout(60):
        assert (await waiting)[1]["status"] == "canceled"
    await until(lambda: front.runtime.handles[0].is_cancelled)
    front.runtime.gate.set()
    status, again, _ = await front.post(f"/v1/jobs/{job['id']}/cancel", {})
    assert (status, again["status"], again["output"]) == (200, "canceled", None)


async def test_a_job_whose_instance_dies_is_tried_again(front: FrontDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearline.controller.durable.job_worker.BACKOFF_S", (0.05, 0.1))
    front.runtime.break_at, front.runtime.breaks_once = (2, InstanceFailed("gone")), True
    _, job, _ = await front.post(PATH, {"prompt": "Hi"}, Invocation_Type="Event")
    _, ended, _ = await front.get(f"/v1/jobs/{job['id']}", Prefer="wait=60")
    assert (ended["status"], ended["attempts"]) == ("succeeded", 2)


async def test_jobs_are_listed_newest_first_and_in_pages(front: FrontDoor) -> None:
    ids = [(await front.post(PATH, {"prompt": str(i)}, Invocation_Type="Event"))[1]["id"] for i in range(5)]
    _, page, _ = await front.get("/v1/jobs?limit=2")
    assert ([job["id"] for job in page["data"]], page["has_more"]) == (ids[:2:-1], True)
    _, rest, _ = await front.get(f"/v1/jobs?limit=9&after={page['data'][-1]['id']}")
    assert ([job["id"] for job in rest["data"]], rest["has_more"]) == (ids[2::-1], False)
    assert (await front.get("/v1/jobs?limit=0"))[0] == 400
    status, answer, _ = await front.get("/v1/jobs?after=job_none")
    assert (status, answer["error"]["param"]) == (400, "after")
    assert all(row.keys().isdisjoint({"output", "usage", "timings"}) for row in page["data"] + rest["data"])
    assert (await front.get("/v1/jobs/job_none"))[1]["error"]["code"] == "job_not_found"


async def test_special_tokens_never_show(front: FrontDoor) -> None:
    front.runtime.script = lambda request: [256, 72, 257, EOS]
    _, answer, _ = await front.post(PATH, {"prompt": "Hi", "max_tokens": 4})
    assert len(answer["output"]["text"]) == 1

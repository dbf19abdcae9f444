"""What every request passes, and the routes that look rather than generate."""

import asyncio
import json
from typing import Any

import pytest

from nearline.controller.tenants import Tenants
from nearline.protocol import CheckpointKind, Digest
from nearline.protocol.errors import Forbidden, Unauthorized, UnsupportedCheckpoint
from tests.controller.http.conftest import FrontDoor, checkpoint, serve, until

HI = [{"role": "user", "content": "Hi"}]


def check_envelope(answer: Any) -> dict[str, Any]:
    error: dict[str, Any] = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "data", "status"),
    [
        ("GET", "/nope", None, 404),
        ("GET", "/v1/functions/x", None, 404),
        ("PUT", "/v1/models", b"{}", 405),
        ("GET", "/v1/chat/completions", None, 405),
        ("POST", "/v1/chat/completions", b"", 400),
        ("POST", "/v1/chat/completions", b"{not json", 400),
        ("POST", "/v1/chat/completions", b"[]", 400),
        ("POST", "/v1/chat/completions", b"\xff\xfe", 400),
        ("POST", "/v1/completions", b"x" * (33 << 20), 413),
        ("GET", "/v1/models/none", None, 404),
        ("DELETE", "/admin/models/none", None, 404),
        ("GET", "/v1/jobs/none", None, 404),
    ],
)
async def test_every_failure_has_the_same_shape(
    front: FrontDoor, method: str, path: str, data: bytes | None, status: int
) -> None:
    async with front.session.request(method, front.url + path, data=data) as response:
        assert response.status == status
        assert response.headers["Content-Type"].startswith("application/json")
        assert response.headers["x-request-id"]
        assert response.headers["x-should-retry"] == "false"
        check_envelope(json.loads(await response.text()))


async def test_a_two_megabyte_prompt_is_answered_with_its_length(front: FrontDoor) -> None:
    status, answer, _ = await front.post("/v1/completions", {"model": "tiny", "prompt": "x" * (2 << 20)})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert str(2 << 20) in answer["error"]["message"]


async def test_a_defect_says_nothing_of_its_inside(front: FrontDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front.runtime, "open", lambda request: 1 / 0)
    for is_streaming in (False, True):
        body = {"model": "tiny", "messages": HI, "stream": is_streaming}
        status, answer, _ = await front.post("/v1/chat/completions", body)
        assert (status, check_envelope(answer)["code"]) == (500, "internal_error")
        assert "division" not in answer["error"]["message"]


async def test_models_are_found_by_any_spelling_of_their_name(front: FrontDoor) -> None:
    _, listed, _ = await front.get("/v1/models")
    found = {model["id"]: model for model in listed["data"]}
    assert found.keys() == {"tiny", "org/tiny:v1", "acme/pirate"}
    assert (found["acme/pirate"]["parent"], found["tiny"]["parent"]) == ("tiny", None)
    for path in ("org/tiny:v1", "org%2Ftiny:v1", "org%2Ftiny%3Av1"):
        _, model, _ = await front.get(f"/v1/models/{path}")
        assert model["id"] == "org/tiny:v1"
    _, adapter, _ = await front.get("/v1/models/tiny:acme%2Fpirate")
    assert (adapter["id"], adapter["parent"], adapter["max_model_len"]) == ("tiny:acme/pirate", "tiny", 64)


async def test_health_tells_living_from_ready(front: FrontDoor) -> None:
    assert (await front.get("/health/live"))[0] == 200
    assert (await front.get("/health/ready"))[0] == 200
    front.runtime.fleet["nodes"] = []
    status, body, _ = await front.get("/health/ready")
    assert (status, body["checks"]) == (503, {"redis": True, "leader": True, "node": False})
    assert (await front.get("/health/live"))[0] == 200


async def test_metrics_count_under_the_names_dashboards_know(front: FrontDoor) -> None:
    await front.post("/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": 5})
    await front.post("/v1/completions", {"model": "nobody", "prompt": "abc"})
    async with front.session.get(front.url + "/metrics") as response:
        text = await response.text()
    assert 'vllm:generation_tokens_total{model_name="tiny"} 5.0' in text
    assert 'vllm:prompt_tokens_total{model_name="tiny"} 3.0' in text
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0' in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0' in text
    assert "nearline_cold_starts_total" in text
    assert "nobody" not in text
    await front.session.delete(front.url + "/admin/adapters/acme/pirate")
    await front.session.delete(front.url + "/admin/models/tiny")
    async with front.session.get(front.url + "/metrics") as response:
        assert 'model_name="tiny"' not in await response.text()


async def test_a_model_is_registered_with_progress_and_can_be_called_at_once(front: FrontDoor) -> None:
    front.runtime.imports["/m"] = checkpoint("d9")
    async with front.session.post(
        front.url + "/admin/models",
        json={"name": "new/one", "source": "/m", "keep_alive_s": 4},
        headers={"Accept": "text/event-stream"},
    ) as response:
        lines = (await response.text()).split("\n\n")
    frames = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert frames[0] == {"phase": "convert", "done_bytes": 1, "total_bytes": 2}
    assert (frames[-1]["id"], frames[-1]["digest"], frames[-1]["keep_alive_s"]) == ("new/one", "d9", 4.0)
    assert front.runtime.models["new/one"].checkpoint.digest == "d9"
    status, _, _ = await front.post("/v1/completions", {"model": "new/one", "prompt": "a"})
    assert status == 200
    _, shown, _ = await front.get("/admin/models/new/one")
    assert (shown["state"], shown["tier"]) == ("asleep", "remote")


async def test_a_model_may_be_asked_for_in_fewer_bits_and_says_what_that_lost(front: FrontDoor) -> None:
    front.runtime.imports["int4:/m"] = checkpoint("d4", quantization="int4", quantization_error=0.07)
    status, shown, _ = await front.post("/admin/models", {"name": "small", "source": "/m", "quantize": "int4"})
    assert (status, shown["quantization"], shown["quantization_error"]) == (201, "int4", 0.07)
    assert (await front.get("/admin/models/tiny"))[1]["quantization"] is None
    status, answer, _ = await front.post("/admin/models", {"name": "odd", "source": "/m", "quantize": "int3"})
    assert (status, answer["error"]["param"]) == (400, "quantize")


async def test_registering_waits_for_the_result_when_no_stream_is_accepted(front: FrontDoor) -> None:
    front.runtime.imports["/a"] = checkpoint("a9", CheckpointKind.ADAPTER, base_digest=Digest("d0"), rank=4, files=())
    body = {"name": "bard", "base": "tiny", "source": "/a"}
    status, adapter, _ = await front.post("/admin/adapters", body)
    assert (status, adapter["id"], adapter["base"], adapter["rank"]) == (201, "bard", "tiny", 4)
    status, answer, _ = await front.post("/admin/adapters", body)
    assert (status, answer["error"]["code"]) == (400, "name_taken")
    front.runtime.imports["/bad"] = UnsupportedCheckpoint("this is no model")
    status, answer, _ = await front.post("/admin/models", {"name": "bad", "source": "/bad"})
    assert (status, answer["error"]["code"]) == (422, "unsupported_checkpoint")
    assert "bad" not in front.door.registry.models
    async with front.session.post(
        front.url + "/admin/models", json={"name": "bad", "source": "/bad"}, headers={"Accept": "application/x-ndjson"}
    ) as response:
        lines = (await response.text()).splitlines()
    assert json.loads(lines[-1])["error"]["code"] == "unsupported_checkpoint"


async def test_bytes_are_kept_from_the_import_to_the_name(front: FrontDoor) -> None:
    seen = []
    put = front.door.registry.put_model

    async def note(spec: Any) -> None:
        seen.append(front.runtime.num_registering)
        await put(spec)

    front.door.registry.put_model = note  # type: ignore[method-assign]
    front.runtime.imports["/m"] = checkpoint("d9")
    assert (await front.post("/admin/models", {"name": "kept", "source": "/m"}))[0] == 201
    front.runtime.imports["/bad"] = UnsupportedCheckpoint("this is no model")
    assert (await front.post("/admin/models", {"name": "bad", "source": "/bad"}))[0] == 422
    assert (seen, front.runtime.num_registering) == ([2], 0), "by the import and by the change itself"


async def test_an_adapter_needs_its_base_and_a_base_keeps_its_adapters(front: FrontDoor) -> None:
    status, answer, _ = await front.post("/admin/adapters", {"name": "x", "base": "nobody", "source": "/a"})
    assert (status, answer["error"]["param"]) == (404, "base")
    async with front.session.delete(front.url + "/admin/models/tiny") as response:
        assert response.status == 400
        assert "acme/pirate" in await response.text()


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/../b", "a b", "", "x" * 201, "a/", "a\u0000b", ".hidden"])
async def test_names_that_could_go_astray_are_refused(front: FrontDoor, name: str) -> None:
    status, answer, _ = await front.post("/admin/models", {"name": name, "source": "/m"})
    assert (status, answer["error"]["param"]) == (400, "name")


async def test_a_client_that_leaves_during_an_import_cancels_it(front: FrontDoor) -> None:
    front.runtime.imports["/slow"] = checkpoint("d8")
    front.runtime.import_gate.clear()
    body = {"name": "slow", "source": "/slow"}
    asking = asyncio.create_task(front.post("/admin/models", body))
    await until(lambda: bool(front.runtime.begun_imports))
    asking.cancel()
    await until(lambda: bool(front.runtime.closed_imports))
    front.runtime.import_gate.set()
    assert "slow" not in front.door.registry.models
    assert (await front.post("/admin/models", body))[0] == 201


async def test_tenants_are_told_apart_by_their_keys(make_door: Any) -> None:
    tenants = Tenants.of(["ann=ka", "bob=kb"], admin_key="root")
    door, runtime = await make_door(tenants=tenants)
    async for front in serve(door, runtime):
        path, body = "/v1/functions/tiny/invocations", {"prompt": "Hi"}
        for wrong in ({}, {"Authorization": "Bearer kc"}, {"Authorization": "Basic ka"}):
            status, answer, _ = await front.post(path, body, **wrong)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        ann, bob = {"Authorization": "Bearer ka"}, {"Authorization": "Bearer kb"}
        _, job, _ = await front.post(path, body, Invocation_Type="Event", **ann)
        assert (await front.get(f"/v1/jobs/{job['id']}", Prefer="wait=60", **ann))[1]["status"] == "succeeded"
        assert (await front.get(f"/v1/jobs/{job['id']}", **bob))[0] == 404
        assert (await front.get("/v1/jobs", **bob))[1]["data"] == []
        assert (await front.post(f"/v1/jobs/{job['id']}/cancel", {}, **bob))[0] == 404
        assert runtime.handles[0].request.tenant == "ann"
        assert runtime.handles[0].request.salt == "ann"
        assert (await front.get("/admin/models", **ann))[0] == 403
        assert (await front.get("/admin/models", Authorization="Bearer root"))[0] == 200
        assert (await front.get("/health/live"))[0] == 200


async def test_a_change_that_reached_redis_is_completed_although_its_caller_left(front: FrontDoor) -> None:
    written = asyncio.Event()
    put = front.door.registry.put_model

    async def slow(spec: Any) -> None:
        await put(spec)
        written.set()
        await asyncio.sleep(0.2)
        assert front.runtime.num_registering == 1, "its bytes are kept although the caller has left"

    front.door.registry.put_model = slow  # type: ignore[method-assign]
    front.runtime.imports["/m"] = checkpoint("d9")
    asking = asyncio.create_task(front.post("/admin/models", {"name": "kept", "source": "/m"}))
    await written.wait()
    asking.cancel()
    await until(lambda: "kept" in front.runtime.models)


async def test_new_weights_under_a_name_need_its_adapters_removed_first(front: FrontDoor) -> None:
    front.runtime.imports["/new"] = checkpoint("d5")
    body = {"name": "tiny", "source": "/new", "replace": True}
    status, answer, _ = await front.post("/admin/models", body)
    assert (status, answer["error"]["code"]) == (422, "adapter_mismatch")
    await front.session.delete(front.url + "/admin/adapters/acme/pirate")
    assert (await front.post("/admin/models", body))[0] == 201
    assert front.runtime.models["tiny"].checkpoint.digest == "d5"


def test_who_sends_no_key_is_told_that_the_admin_key_is_what_it_takes() -> None:
    tenants = Tenants.of([], admin_key="root")
    tenants.check_admin("Bearer root")
    with pytest.raises(Unauthorized, match="needs the admin key"):
        tenants.check_admin(None)
    with pytest.raises(Forbidden, match="needs the admin key"):
        tenants.check_admin("Bearer other")

"""POST /v1/functions/{name}/invocations: call a model like a function, at once, later, or not at all."""

import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from nearline.controller.durable.jobs import Job, JobRequest
from nearline.controller.durable.registry import Target
from nearline.controller.http.answers import Answer, OnFirstToken
from nearline.controller.http.bodies import Data, read_body
from nearline.controller.http.calls import chat_prompt, load, make_call, text_prompt, wish_of
from nearline.controller.http.constraints import bounded, grammar_of
from nearline.controller.http.door import Caller, Door, caller_of, door_of, tenant_of
from nearline.controller.http.generation import Call
from nearline.controller.http.replies import reply
from nearline.controller.http.schemas import FunctionBody
from nearline.controller.shown import shown
from nearline.protocol import JobId, SamplingParams
from nearline.protocol.errors import InvalidRequest

INVOCATION_TYPES = ("RequestResponse", "Event", "DryRun")
DEFAULT_MAX_TOKENS = SamplingParams().max_tokens


class Invocation:
    """One function call under way, and the two ways to tell its answer."""

    def __init__(self, name: str, body: FunctionBody, answer: Answer) -> None:
        self.body = body
        self._name = name
        self._answer = answer

    @classmethod
    async def open(cls, door: Door, caller: Caller, name: str, data: Data) -> "Invocation":
        """Validate, tokenise and start. Raises NearlineError; nothing runs then."""
        target, body, call = await prepare(door, caller, name, data)
        return cls(name, body, await Answer.open(door, caller, target, [call]))

    async def result(self, on_first_token: OnFirstToken | None = None) -> dict[str, Any]:
        """Wait for the whole answer."""
        (choice,) = await self._answer.collect(on_first_token)
        output = {"text": choice.text, "finish_reason": choice.finish_reason}
        return {"id": self._answer.request_id, "model": self._name, "output": output, **self._counts()}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield `{delta}` as text comes and at the end the reason, the usage and the waterfall."""
        async with aclosing(self._answer.pieces()) as pieces:
            async for _, delta in pieces:
                if delta.text:
                    yield {"delta": delta.text}
        (reason,) = self._answer.finish_reasons
        yield {"id": self._answer.request_id, "model": self._name, "finish_reason": reason, **self._counts()}

    def close(self) -> None:
        self._answer.close()

    def _counts(self) -> dict[str, Any]:
        return {"usage": self._answer.usage, "timings": self._answer.timings}


async def prepare(door: Door, caller: Caller, name: str, data: Data) -> tuple[Target, FunctionBody, Call]:
    """Do everything short of running. Raises NearlineError."""
    body = await read_body(FunctionBody, data)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either `prompt` or `messages`", param="prompt")
    target, text = await load(door, name)
    if body.messages is not None:
        prompt = await chat_prompt(target, text, body, body.messages)
    else:
        prompt = await text_prompt(target, text, body.prompt or "")
    call = make_call(caller, target, text, prompt, body, DEFAULT_MAX_TOKENS)
    return target, body, bounded(call, await grammar_of(door, caller.tenant, body))


async def invoke(request: web.Request) -> web.StreamResponse:
    door, caller, name = door_of(request), caller_of(request), request.match_info["name"]
    kind = request.headers.get("Invocation-Type", "RequestResponse")
    if kind not in INVOCATION_TYPES:
        types = ", ".join(INVOCATION_TYPES)
        raise InvalidRequest(f"Invocation-Type is one of {types}, not {shown(kind)}", param="Invocation-Type")
    data = await request.read()
    if kind == "DryRun":
        await prepare(door, caller, name, data)
        return web.Response(status=204)
    if kind == "Event" or "respond-async" in request.headers.get("Prefer", ""):
        return await _submit(request, name, data)
    invocation = await Invocation.open(door, caller, name, data)
    return await reply(request, invocation, bool(invocation.body.stream))


async def _submit(request: web.Request, name: str, data: bytes) -> web.StreamResponse:
    door = door_of(request)
    _, body, _ = await prepare(door, caller_of(request), name, data)
    job_request = JobRequest(
        tenant=tenant_of(request),
        endpoint="function",
        model=name,
        body={**json.loads(data), "stream": False},
        deadline_s=wish_of(body).deadline_s or 86_400.0,
        idempotency_key=idempotency_key(request),
    )
    return await accepted(request, await door.jobs.submit(job_request))


async def accepted(request: web.Request, job_id: JobId) -> web.StreamResponse:
    """Answer with the job: 202 while it goes on, 200 when it ended within `Prefer: wait=N`."""
    door = door_of(request)
    job = await door.jobs.wait(job_id, tenant_of(request), preferred_wait_s(request))
    status = 200 if job.state.is_terminal else 202
    return web.json_response(job_object(job), status=status, headers={"Location": f"/v1/jobs/{job_id}"})


def job_object(job: Job) -> dict[str, Any]:
    """A job in the words of the API."""
    from_result = job.result or {}
    return {
        "id": job.job_id,
        "object": "job",
        "model": job.model,
        "endpoint": job.endpoint,
        "status": job.state.value,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "completed_at": job.completed_at,
        "deadline_at": job.deadline_at,
        "attempts": job.attempt,
        "max_attempts": job.max_attempts,
        "output": from_result.get("output") if job.endpoint == "function" else job.result,
        "usage": from_result.get("usage"),
        "timings": from_result.get("timings"),
        "error": {"code": job.error.code, "message": job.error.message} if job.error else None,
        "urls": {"get": f"/v1/jobs/{job.job_id}", "cancel": f"/v1/jobs/{job.job_id}/cancel"},
    }


_WAIT = re.compile(r"\bwait=(\d{1,4})\b")
MAX_WAIT_S = 60.0


def preferred_wait_s(request: web.Request) -> float:
    """How long the client likes to wait for an end. Source: RFC 7240."""
    found = _WAIT.search(request.headers.get("Prefer", ""))
    return min(float(found.group(1)), MAX_WAIT_S) if found else 0.0


def idempotency_key(request: web.Request) -> str | None:
    """Raises InvalidRequest for a key that is too long."""
    key = request.headers.get("Idempotency-Key")
    if key is not None and not 1 <= len(key) <= 255:
        raise InvalidRequest(f"an Idempotency-Key has 1 to 255 characters, not {len(key)}", param="Idempotency-Key")
    return key

"""/v1/jobs: submit, look, wait, cancel, list; and how a worker runs one."""

from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

from aiohttp import web

from nearline.controller.durable.jobs import Job, JobRequest
from nearline.controller.http.bodies import read_body
from nearline.controller.http.calls import check_length
from nearline.controller.http.constraints import grammar_of
from nearline.controller.http.door import Caller, Door, caller_of, door_of, tenant_of
from nearline.controller.http.functions import Invocation, accepted, idempotency_key, job_object, preferred_wait_s
from nearline.controller.http.functions import prepare as prepare_function
from nearline.controller.http.openai_chat import ChatCompletion
from nearline.controller.http.openai_completions import Completion, prompts_of
from nearline.controller.http.openai_embeddings import Embedding, inputs_of
from nearline.controller.http.schemas import ChatBody, CompletionBody, EmbeddingBody, JobBody
from nearline.controller.policy.jobs import promise
from nearline.controller.shown import shown
from nearline.protocol.errors import InvalidRequest

MAX_LISTED = 100


async def submit(request: web.Request) -> web.StreamResponse:
    door, tenant = door_of(request), tenant_of(request)
    body = await read_body(JobBody, await request.read())
    await _check(door, caller_of(request), body)
    job_request = JobRequest(
        tenant=tenant,
        endpoint=body.endpoint,
        model=body.model,
        body={**body.input, "model": body.model, "stream": False},
        deadline_s=body.deadline_s,
        max_attempts=body.max_attempts,
        idempotency_key=idempotency_key(request),
    )
    return await accepted(request, await door.jobs.submit(job_request))


async def get(request: web.Request) -> web.StreamResponse:
    job_id, wait_s = request.match_info["job_id"], preferred_wait_s(request)
    return web.json_response(job_object(await door_of(request).jobs.wait(job_id, tenant_of(request), wait_s)))


async def cancel(request: web.Request) -> web.StreamResponse:
    job = await door_of(request).jobs.cancel(request.match_info["job_id"], tenant_of(request))
    return web.json_response(job_object(job))


async def list_jobs(request: web.Request) -> web.StreamResponse:
    text = request.query.get("limit", "20")
    if not text.isdecimal() or len(text) > 3 or not 1 <= int(text) <= MAX_LISTED:
        raise InvalidRequest(f"limit is a number from 1 to {MAX_LISTED}, not {shown(text)}", param="limit")
    limit, after = int(text), request.query.get("after")
    jobs = await door_of(request).jobs.list_jobs(tenant_of(request), limit + 1, after)
    data = [_listed(job) for job in jobs[:limit]]
    return web.json_response({"object": "list", "data": data, "has_more": len(jobs) > limit})


def _listed(job: Job) -> dict[str, Any]:
    """A job without what only its end brings: ask for it alone to see its output."""
    row = job_object(job)
    return {name: value for name, value in row.items() if name not in ("output", "usage", "timings")}


async def _check(door: Door, caller: Caller, body: JobBody) -> None:
    """Find what is wrong before the job is accepted. Raises NearlineError."""
    data = {**body.input, "model": body.model}
    if body.endpoint == "function":
        await prepare_function(door, caller, body.model, body.input)
    elif body.endpoint == "/v1/chat/completions":
        door.registry.resolve(body.model)
        await grammar_of(door, caller.tenant, await read_body(ChatBody, data))
    elif body.endpoint == "/v1/embeddings":
        door.registry.resolve(body.model)
        inputs_of(await read_body(EmbeddingBody, data))
    else:
        target, completion = door.registry.resolve(body.model), await read_body(CompletionBody, data)
        for prompt in prompts_of(completion):
            check_length(target, prompt, least=0 if completion.max_tokens == 0 else 1)
        await grammar_of(door, caller.tenant, completion)


async def run_job(door: Door, job: Job, started: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    """Run one attempt of a job to its result. Raises NearlineError."""
    slo = promise(job.left_s)
    caller = Caller(job.tenant, slo, door.limits.slo_cap(job.tenant))
    data = {**job.body, "deadline_s": slo.deadline_s}
    if job.endpoint == "/v1/embeddings":
        return await (await Embedding.open(door, caller, data)).result(on_first_token=started)
    running: Invocation | ChatCompletion | Completion
    if job.endpoint == "function":
        fields = {name: value for name, value in data.items() if name != "model"}
        running = await Invocation.open(door, caller, job.model, fields)
    elif job.endpoint == "/v1/chat/completions":
        running = await ChatCompletion.open(door, caller, data)
    else:
        running = await Completion.open(door, caller, data)
    with closing(running):
        return await running.result(on_first_token=started)

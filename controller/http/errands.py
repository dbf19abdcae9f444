"""Errands on a registered model or adapter: check or copy its bytes, give its DRAM back, measure its steps."""

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

import structlog
from aiohttp import web

from nearline.controller.http.door import Door, door_of, tenant_of
from nearline.controller.http.sse import stream_events
from nearline.protocol import (
    Bytes,
    CheckpointInfo,
    CheckpointKind,
    ModelId,
    NodeId,
    Request,
    RequestId,
    SamplingParams,
    Seconds,
    TenantId,
    to_plain,
)
from nearline.protocol.frames import ProfileProgress, TaskProgress

Event = dict[str, Any]
log = structlog.get_logger(__name__)


def errand_routes() -> list[web.RouteDef]:
    return [
        web.post("/admin/{kind:models|adapters}/{name:.+}/verify", verify),
        web.post("/admin/{kind:models|adapters}/{name:.+}/evict", evict),
        web.post("/admin/{kind:models|adapters}/{name:.+}/copy", copy),
        web.post("/admin/models/{name:.+}/profile", profile),
    ]


async def verify(request: web.Request) -> web.StreamResponse:
    """Answer with SSE (progress, then the result), or with the result alone, as `Accept` asks."""
    door, name = door_of(request), request.match_info["name"]
    return await _answer(request, _verify(door, name, _checkpoint(request)))


async def profile(request: web.Request) -> web.StreamResponse:
    """Start the model if it does not run, measure it while it is idle, and answer as `verify` does."""
    checkpoint, name = _checkpoint(request), request.match_info["name"]
    return await _answer(request, _profile(door_of(request), name, checkpoint, tenant_of(request)))


async def copy(request: web.Request) -> web.StreamResponse:
    """Copy to the node that `?node=` names, or to the one with most disk left; answer as `verify` does."""
    wished, name = request.query.get("node"), request.match_info["name"]
    events = _copy(door_of(request), name, _checkpoint(request), NodeId(wished) if wished else None)
    return await _answer(request, events)


async def _answer(request: web.Request, events: AsyncGenerator[Event, None]) -> web.StreamResponse:
    if "text/event-stream" in request.headers.get("Accept", ""):
        return await stream_events(request, events, door_of(request).heartbeat_s)
    result: Event = {}
    async with aclosing(events):
        async for event in events:
            result = event
    return web.json_response(result)


async def evict(request: web.Request) -> web.StreamResponse:
    name, checkpoint = request.match_info["name"], _checkpoint(request)
    freed_bytes = await door_of(request).runtime.evict_checkpoint(checkpoint.digest)
    log.info("checkpoint_evicted", name=name, freed_bytes=freed_bytes)
    return web.json_response({"id": name, "digest": checkpoint.digest, "freed_bytes": freed_bytes})


async def _verify(door: Door, name: str, checkpoint: CheckpointInfo) -> AsyncGenerator[Event, None]:
    nodes: list[Event] = []
    async with aclosing(door.runtime.verify_checkpoint(checkpoint.digest)) as frames:
        async for node_id, frame in frames:
            if isinstance(frame, TaskProgress):
                fields = {"done_bytes": frame.done_bytes, "total_bytes": frame.total_bytes}
                yield {"phase": frame.phase, "node": node_id, **fields}
            else:
                nodes.append({"node": node_id, **_measures(frame.num_bytes, frame.seconds)})
    measures = _measures(sum(node["num_bytes"] for node in nodes), sum(node["seconds"] for node in nodes))
    log.info("checkpoint_verified", name=name, digest=checkpoint.digest, **measures)
    yield {"id": name, "digest": checkpoint.digest, "is_valid": True, **measures, "nodes": nodes}


async def _copy(
    door: Door, name: str, checkpoint: CheckpointInfo, node_id: NodeId | None
) -> AsyncGenerator[Event, None]:
    async with aclosing(door.runtime.copy_checkpoint(checkpoint, node_id)) as frames:
        async for chosen, frame in frames:
            if isinstance(frame, TaskProgress):
                fields = {"done_bytes": frame.done_bytes, "total_bytes": frame.total_bytes}
                yield {"phase": frame.phase, "node": chosen, **fields}
            else:
                log.info("checkpoint_copied", name=name, node=chosen, digest=checkpoint.digest)
                yield {"id": name, "digest": checkpoint.digest, "node": chosen, "num_bytes": checkpoint.num_bytes}


async def _profile(door: Door, name: str, checkpoint: CheckpointInfo, tenant: TenantId) -> AsyncGenerator[Event, None]:
    instances = door.runtime.snapshot()["instances"]
    if not any(row["digest"] == checkpoint.digest and row["state"] == "ready" for row in instances):
        yield {"phase": "starting", "node": None, "done_steps": 0, "total_steps": 0}
    start = partial(_start, door, ModelId(name), checkpoint, tenant)
    async with aclosing(door.runtime.profile_checkpoint(checkpoint.digest, start)) as frames:
        async for node_id, frame in frames:
            if isinstance(frame, ProfileProgress):
                steps = {"done_steps": frame.done_steps, "total_steps": frame.total_steps}
                yield {"phase": frame.phase, "node": node_id, **steps}
            else:
                log.info("model_profiled", name=name, node=node_id, digest=checkpoint.digest)
                yield {"id": name, "node": node_id, **to_plain(frame.profile)}


async def _start(door: Door, model_id: ModelId, checkpoint: CheckpointInfo, tenant: TenantId) -> None:
    """Have the fleet start the model as it would for anybody: by asking it for one token."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    prompt = (checkpoint.bos_token_id or 0,)
    request = Request(RequestId(f"profile-{uuid.uuid4().hex}"), model_id, prompt, sampling, tenant=tenant)
    handle = door.runtime.open(request)
    try:
        async for _ in handle:
            pass
    finally:
        handle.cancel()


def _measures(num_bytes: Bytes, seconds: Seconds) -> Event:
    return {"num_bytes": num_bytes, "seconds": seconds, "bytes_per_s": num_bytes / max(seconds, 1e-9)}


def _checkpoint(request: web.Request) -> CheckpointInfo:
    registry, name = door_of(request).registry, request.match_info["name"]
    is_model = request.match_info.get("kind", "models") == "models"
    spec = registry.models.get(name) if is_model else registry.adapters.get(name)
    if spec is None:
        raise registry.missing(CheckpointKind.MODEL if is_model else CheckpointKind.ADAPTER, name)
    return spec.checkpoint

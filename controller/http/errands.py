"""Errands on a registered model or adapter: check its bytes, give its DRAM back."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import structlog
from aiohttp import web

from nearline.controller.http.door import Door, door_of
from nearline.controller.http.sse import stream_events
from nearline.protocol import Bytes, CheckpointInfo, Seconds
from nearline.protocol.errors import ModelNotFound
from nearline.protocol.frames import ImportProgress

Event = dict[str, Any]
log = structlog.get_logger(__name__)


def errand_routes() -> list[web.RouteDef]:
    return [
        web.post("/admin/{kind:models|adapters}/{name:.+}/verify", verify),
        web.post("/admin/{kind:models|adapters}/{name:.+}/evict", evict),
    ]


async def verify(request: web.Request) -> web.StreamResponse:
    """Answer with SSE (progress, then the result), or with the result alone, as `Accept` asks."""
    door, name = door_of(request), request.match_info["name"]
    events = _verify(door, name, _checkpoint(request))
    if "text/event-stream" in request.headers.get("Accept", ""):
        return await stream_events(request, events, door.heartbeat_s)
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
            if isinstance(frame, ImportProgress):
                fields = {"done_bytes": frame.done_bytes, "total_bytes": frame.total_bytes}
                yield {"phase": frame.phase, "node": node_id, **fields}
            else:
                nodes.append({"node": node_id, **_measures(frame.num_bytes, frame.seconds)})
    measures = _measures(sum(node["num_bytes"] for node in nodes), sum(node["seconds"] for node in nodes))
    log.info("checkpoint_verified", name=name, digest=checkpoint.digest, **measures)
    yield {"id": name, "digest": checkpoint.digest, "is_valid": True, **measures, "nodes": nodes}


def _measures(num_bytes: Bytes, seconds: Seconds) -> Event:
    return {"num_bytes": num_bytes, "seconds": seconds, "bytes_per_s": num_bytes / max(seconds, 1e-9)}


def _checkpoint(request: web.Request) -> CheckpointInfo:
    registry, name = door_of(request).registry, request.match_info["name"]
    is_model = request.match_info["kind"] == "models"
    spec = registry.models.get(name) if is_model else registry.adapters.get(name)
    if spec is None:
        raise ModelNotFound(f"no {'model' if is_model else 'adapter'} is named {name!r}", param="name")
    return spec.checkpoint

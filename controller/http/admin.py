"""/admin: register and remove models and adapters, look at the fleet."""

import json
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from nearline import __version__
from nearline.controller.http.door import Door, door_of
from nearline.controller.http.errands import errand_routes
from nearline.controller.http.errors import envelope
from nearline.controller.http.ports import Snapshot
from nearline.controller.http.registration import Event, Registrar, adapter_object, check_limits, model_object
from nearline.controller.http.schemas import AdapterBody, ModelBody, ModelPatch, parse
from nearline.controller.http.sse import stream_events
from nearline.protocol import CheckpointKind, ModelId, ModelSpec, Tier
from nearline.protocol.errors import NearlineError


class Admin:
    """The admin routes. Owns: the registrar."""

    def __init__(self) -> None:
        self._registrar = Registrar()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/admin/models", self.add_model),
            web.get("/admin/models", list_models),
            *errand_routes(),
            web.get("/admin/models/{name:.+}", get_model),
            web.patch("/admin/models/{name:.+}", self.change_model),
            web.delete("/admin/models/{name:.+}", self.remove_model),
            web.post("/admin/adapters", self.add_adapter),
            web.get("/admin/adapters", list_adapters),
            web.get("/admin/adapters/{name:.+}", get_adapter),
            web.delete("/admin/adapters/{name:.+}", self.remove_adapter),
            web.get("/admin/fleet", show_fleet),
            *[web.get(f"/admin/{kind}", list_rows) for kind in ("instances", "nodes", "queues")],
        ]

    async def add_model(self, request: web.Request) -> web.StreamResponse:
        body = parse(ModelBody, await request.read())
        check_limits(body)
        return await self._register(request, body)

    async def add_adapter(self, request: web.Request) -> web.StreamResponse:
        return await self._register(request, parse(AdapterBody, await request.read()))

    async def change_model(self, request: web.Request) -> web.StreamResponse:
        body, name = parse(ModelPatch, await request.read()), ModelId(request.match_info["name"])
        return web.json_response(await self._registrar.change_model(door_of(request), name, body))

    async def remove_model(self, request: web.Request) -> web.StreamResponse:
        name = ModelId(request.match_info["name"])
        return web.json_response(await self._registrar.remove_model(door_of(request), name))

    async def remove_adapter(self, request: web.Request) -> web.StreamResponse:
        name = ModelId(request.match_info["name"])
        return web.json_response(await self._registrar.remove_adapter(door_of(request), name))

    async def _register(self, request: web.Request, body: ModelBody | AdapterBody) -> web.StreamResponse:
        """Answer with SSE, with lines of JSON, or with the registered object alone, as `Accept` asks."""
        door = door_of(request)
        self._registrar.check(door, body)
        events = self._registrar.events(door, body)
        accept = request.headers.get("Accept", "")
        if "text/event-stream" in accept:
            return await stream_events(request, events, door.heartbeat_s)
        if "application/x-ndjson" in accept:
            return await _stream_lines(request, events)
        registered: Event = {}
        async with aclosing(events):
            async for event in events:
                registered = event
        return web.json_response(registered, status=201)


async def list_models(request: web.Request) -> web.StreamResponse:
    door = door_of(request)
    seen = _Seen(door, door.runtime.snapshot())
    return _listed([seen.of(spec) for spec in door.registry.models.values()])


async def get_model(request: web.Request) -> web.StreamResponse:
    door, name = door_of(request), request.match_info["name"]
    if name not in door.registry.models:
        raise door.registry.missing(CheckpointKind.MODEL, name)
    seen = _Seen(door, door.runtime.snapshot())
    spec = door.registry.models[name]
    return web.json_response(seen.of(spec) | {"profiles": seen.profiles(spec)})


async def list_adapters(request: web.Request) -> web.StreamResponse:
    return _listed([adapter_object(spec) for spec in door_of(request).registry.adapters.values()])


async def get_adapter(request: web.Request) -> web.StreamResponse:
    registry, name = door_of(request).registry, request.match_info["name"]
    if name not in registry.adapters:
        raise registry.missing(CheckpointKind.ADAPTER, name)
    return web.json_response(adapter_object(registry.adapters[name]))


async def list_rows(request: web.Request) -> web.StreamResponse:
    return _listed(door_of(request).runtime.snapshot()[request.path.rpartition("/")[2]])


async def show_fleet(request: web.Request) -> web.StreamResponse:
    """All of it at once, for whoever watches: models, instances, queues and nodes, these without their checkpoints."""
    door = door_of(request)
    rows = door.runtime.snapshot()
    seen = _Seen(door, rows)
    return web.json_response(
        {
            "version": __version__,
            "models": [seen.of(spec) for spec in door.registry.models.values()],
            "instances": rows["instances"],
            "queues": rows["queues"],
            "nodes": [{k: v for k, v in node.items() if k not in ("residency", "profiles")} for node in rows["nodes"]],
        }
    )


class _Seen:
    """What the fleet says of models: one snapshot, indexed, so that a list of many models takes one look."""

    def __init__(self, door: Door, snapshot: Snapshot) -> None:
        self._nodes = snapshot["nodes"]
        self._states: defaultdict[str, list[str]] = defaultdict(list)
        self._num_waiting: Counter[str] = Counter()
        self._missing: dict[str, tuple[int, str | None]] = {}
        self._adapters: defaultdict[str, list[str]] = defaultdict(list)
        for row in snapshot["instances"]:
            self._states[row["model"]].append(row["state"])
        for row in snapshot["models"]:
            self._num_waiting[row["id"]] += row["num_waiting"]
            if row["num_missing"]:
                self._missing[row["id"]] = (row["num_missing"], row["missing_because"])
        for adapter in door.registry.adapters.values():
            self._adapters[adapter.base_id].append(adapter.adapter_id)

    def of(self, spec: ModelSpec) -> dict[str, Any]:
        """Describe a model with what runs, and the nearest tier that holds all its bytes."""
        states = self._states.get(spec.model_id, [])
        num_missing, because = self._missing.get(spec.model_id, (0, None))
        is_ready = "ready" in states
        return {
            **model_object(spec),
            "state": "ready" if is_ready else states[0] if states else "asleep",
            "tier": Tier.DEVICE.value if is_ready else _nearest_tier(self._nodes, spec).value,
            "num_instances": len(states),
            "num_waiting": self._num_waiting[spec.model_id],
            "num_missing": num_missing,
            "missing_because": because,
            "adapters": sorted(self._adapters.get(spec.model_id, [])),
        }

    def profiles(self, spec: ModelSpec) -> dict[str, Any]:
        """What nodes have measured its steps to take, by node."""
        rows = ((node["id"], node["profiles"].get(spec.checkpoint.digest)) for node in self._nodes)
        return {node_id: profile for node_id, profile in rows if profile}


def _nearest_tier(nodes: list[dict[str, Any]], spec: ModelSpec) -> Tier:
    held = [node["residency"].get(spec.checkpoint.digest) for node in nodes]
    for tier in (Tier.DRAM, Tier.SSD):
        if any(row and row[f"{tier.value}_bytes"] >= spec.checkpoint.num_bytes for row in held):
            return tier
    return Tier.REMOTE


def _listed(data: list[dict[str, Any]]) -> web.Response:
    return web.json_response({"object": "list", "data": data})


async def _stream_lines(request: web.Request, events: AsyncGenerator[Event, None]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "X-Accel-Buffering": "no"})
    await response.prepare(request)
    async with aclosing(events):
        try:
            async for event in events:
                await response.write(json.dumps(event).encode() + b"\n")
        except NearlineError as error:
            await response.write(json.dumps(envelope(error)).encode() + b"\n")
    await response.write_eof()
    return response

"""GET /v1/models and /v1/models/{id}: what may be called, adapters with their `parent`."""

from typing import Any

from aiohttp import web

from nearline.controller.http.door import door_of
from nearline.controller.registry import Registry
from nearline.protocol import AdapterSpec, ModelSpec


async def list_models(request: web.Request) -> web.StreamResponse:
    registry = door_of(request).registry
    data = [_model(spec) for spec in registry.models.values()]
    data += [_adapter(registry, spec) for spec in registry.adapters.values()]
    return web.json_response({"object": "list", "data": data})


async def get_model(request: web.Request) -> web.StreamResponse:
    registry = door_of(request).registry
    target = registry.resolve(request.match_info["name"])
    found = _adapter(registry, target.adapter) if target.adapter else _model(target.model)
    return web.json_response({**found, "id": target.name})


def _model(spec: ModelSpec) -> dict[str, Any]:
    limit = spec.checkpoint.max_context_tokens
    return {**_head(spec.model_id, spec.created_at), "root": spec.checkpoint.source, "parent": None} | {
        "max_model_len": limit or None
    }


def _adapter(registry: Registry, spec: AdapterSpec) -> dict[str, Any]:
    base = registry.models.get(spec.base_id)
    limit = base.checkpoint.max_context_tokens if base else 0
    return {**_head(spec.adapter_id, spec.created_at), "root": spec.checkpoint.source, "parent": spec.base_id} | {
        "max_model_len": limit or None
    }


def _head(name: str, created_at: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created_at), "owned_by": "nearline"}

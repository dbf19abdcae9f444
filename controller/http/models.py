"""GET /v1/models and /v1/models/{id}: what may be called, adapters with their `parent`."""

import re
from typing import Any

from aiohttp import web

from nearline.controller.durable.registry import Registry
from nearline.controller.http.door import door_of
from nearline.protocol import AdapterSpec, ModelSpec

_HUB = re.compile(r"(?:int[48]:|as-is:)?hub:(.+)")
"""Such a source, with what was to be done with it in front."""


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
    return _card(spec.model_id, None, spec, spec.checkpoint.max_context_tokens)


def _adapter(registry: Registry, spec: AdapterSpec) -> dict[str, Any]:
    base = registry.models.get(spec.base_id)
    return _card(spec.adapter_id, spec.base_id, spec, base.checkpoint.max_context_tokens if base else 0)


def _public(source: str) -> str | None:
    """A source by the name the hub knows it by. Paths and addresses of ours are nobody's business who only calls."""
    found = _HUB.fullmatch(source)
    return found[1] if found else None


def _card(name: str, parent: str | None, spec: ModelSpec | AdapterSpec, limit: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(spec.created_at),
        "owned_by": "nearline",
        "root": _public(spec.checkpoint.source),
        "parent": parent,
        "max_model_len": limit or None,
    }

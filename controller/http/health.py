"""/, /health/live, /health/ready and /metrics. None of them wakes a model or needs a key."""

import asyncio
from pathlib import Path

from aiohttp import web

from nearline import __version__
from nearline.controller.http.door import Door, door_of
from nearline.protocol.errors import NearlineError

PROBE_LIMIT_S = 2.0
DASHBOARD = (Path(__file__).parent / "static" / "dashboard.html").read_bytes()
PAGE_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "Vary": "Accept",
}
LINKS = {
    "models": "/v1/models",
    "functions": "/v1/functions/{name}/invocations",
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "jobs": "/v1/jobs",
    "admin": "/admin/models",
    "fleet": "/admin/fleet",
    "health": "/health/ready",
    "metrics": "/metrics",
}


async def welcome(request: web.Request) -> web.StreamResponse:
    """What answers here, and the main routes; browsers get the dashboard, which asks for a key if one is needed."""
    if "text/html" in request.headers.get("Accept", ""):
        return web.Response(body=DASHBOARD, headers=PAGE_HEADERS)
    return web.json_response({"name": "nearline", "version": __version__, "links": LINKS})


async def live(request: web.Request) -> web.StreamResponse:
    """The process runs: always 200, also under overload."""
    return web.json_response({"status": "live"})


async def ready(request: web.Request) -> web.StreamResponse:
    """Requests can be answered: Redis is there, this controller leads, and a node is connected."""
    door = door_of(request)
    checks = {
        "redis": await _has_redis(door),
        "leader": door.lease.token > 0,
        "node": bool(door.runtime.snapshot()["nodes"]),
    }
    is_ready = all(checks.values())
    body = {"status": "ready" if is_ready else "not_ready", "checks": checks}
    return web.json_response(body, status=200 if is_ready else 503)


async def metrics(request: web.Request) -> web.StreamResponse:
    door = door_of(request)
    door.metrics.observe(door.runtime.snapshot())
    try:
        async with asyncio.timeout(PROBE_LIMIT_S):
            for state, count in (await door.jobs.counts()).items():
                door.metrics.jobs.labels(state).set(count)
    except (NearlineError, TimeoutError):
        door.metrics.jobs.clear()
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=door.metrics.render(), headers=headers)


async def _has_redis(door: Door) -> bool:
    try:
        async with asyncio.timeout(PROBE_LIMIT_S):
            await door.state.ping()
    except (NearlineError, TimeoutError):
        return False
    return True

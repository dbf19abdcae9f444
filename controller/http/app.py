"""The application: its routes, and what every request passes: an id, a key, a counter, one shape of error."""

import re
import uuid
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from nearline.controller.http import functions, health, jobs_api, models
from nearline.controller.http.admin import Admin
from nearline.controller.http.browsers import check_no_page, check_origin
from nearline.controller.http.door import DOOR, REQUEST_ID, TENANT, Door, door_of
from nearline.controller.http.errors import MAX_BODY_BYTES, error_response, http_error_response
from nearline.controller.http.openai_chat import chat_completions
from nearline.controller.http.openai_completions import completions
from nearline.controller.http.openai_embeddings import embeddings
from nearline.protocol.errors import InvalidRequest, NearlineError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

KEEPALIVE_S = 75.0
SHUTDOWN_S = 8.0
NODE_PATH = "/internal/node"

log = structlog.get_logger(__name__)

_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}")
_OPEN_PATHS = ("/health", "/metrics", NODE_PATH)


def create_app(door: Door, node_handler: Handler | None = None) -> web.Application:
    """Make the front door. `node_handler` answers the node agents' WebSockets and checks their token itself."""
    app = web.Application(
        middlewares=[_outermost, _authenticate, _limit],
        client_max_size=MAX_BODY_BYTES,
        handler_args={"handler_cancellation": True, "keepalive_timeout": KEEPALIVE_S},
    )
    app[DOOR] = door
    app.on_response_prepare.append(_stamp)
    app.on_cleanup.append(_close)
    app.add_routes(
        [
            web.get("/", health.welcome),
            web.get("/health", health.live),
            web.get("/health/live", health.live),
            web.get("/health/ready", health.ready),
            web.get("/metrics", health.metrics),
            web.post("/v1/functions/{name:.+}/invocations", functions.invoke),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{name:.+}", models.get_model),
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/v1/embeddings", embeddings),
            web.post("/v1/jobs", jobs_api.submit),
            web.get("/v1/jobs", jobs_api.list_jobs),
            web.get("/v1/jobs/{job_id}", jobs_api.get),
            web.post("/v1/jobs/{job_id}/cancel", jobs_api.cancel),
            *Admin().routes(),
        ]
    )
    if node_handler is not None:
        app.router.add_get(NODE_PATH, node_handler)
    return app


async def _close(app: web.Application) -> None:
    await app[DOOR].grammars.close()


@web.middleware
async def _outermost(request: web.Request, handler: Handler) -> web.StreamResponse:
    door = door_of(request)
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else f"http_{uuid.uuid4().hex}"
    status = 499
    door.metrics.in_flight.inc()
    try:
        response = await _answered(request, handler)
        status = response.status
        return response
    finally:
        door.metrics.in_flight.dec()
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "none"
        door.metrics.http.labels(route, request.method, str(status)).inc()


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except NearlineError as error:
        if error.status >= 500:
            log.warning("request_failed", request_id=request[REQUEST_ID], code=error.code, error=error.message)
        return error_response(error)
    except web.HTTPException as error:
        return http_error_response(error, f"{request.method} {request.path}")
    except web.RequestPayloadError as error:
        log.info("bad_payload", request_id=request[REQUEST_ID], error=str(error))
        return error_response(InvalidRequest("the body is not what its Content-Length or Content-Encoding says"))
    except ConnectionError as error:
        log.info("client_gone", request_id=request[REQUEST_ID], error=str(error))
        raise
    except Exception as error:
        log.exception("request_broke", request_id=request[REQUEST_ID], path=request.path)
        return error_response(error)


@web.middleware
async def _authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.path.startswith(NODE_PATH):
        check_no_page(request)
    if request.path.startswith(_OPEN_PATHS):
        return await handler(request)
    check_origin(request, door_of(request))
    if request.path != "/":
        tenants = door_of(request).tenants
        authorization = request.headers.get("Authorization")
        request[TENANT] = tenants.authenticate(authorization)
        if request.path.startswith("/admin"):
            tenants.check_admin(authorization)
    return await handler(request)


@web.middleware
async def _limit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Hold tenants to their limits wherever work begins; looking and cancelling are free."""
    is_work = request.method == "POST" and request.path.startswith("/v1/") and not request.path.endswith("/cancel")
    if not is_work:
        return await handler(request)
    door = door_of(request)
    async with door.limits.admitted(door.state, request[TENANT]):
        return await handler(request)


async def _stamp(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.setdefault("x-request-id", request.get(REQUEST_ID, "none"))

"""The HTTP server below the application: what it answers itself, before any route is known, has our shape too.

aiohttp says in plain text that a request line is too long, a Host is missing, a chunk is broken or an Expect is odd.
"""

import re
import uuid

import structlog
from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import LineTooLong

from nearline.controller.http.errors import error_response, http_error_response
from nearline.protocol.errors import InvalidRequest, NearlineError

MAX_REASON = 200
_QUOTED = re.compile(r"""\bb(['"]).*""", re.DOTALL)
log = structlog.get_logger(__name__)


class Protocol(web.RequestHandler):
    """One connection."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what no route could, and close. Raises ConnectionError when an answer was under way."""
        if status < 500:
            log.info("bad_http", peer=request.remote, status=status, error=type(exc).__name__)
            response = error_response(InvalidRequest(f"this is not valid HTTP/1.1: {_reason(exc, message)}"))
            response.set_status(status)
        elif isinstance(exc, ConnectionError):  # of a client that hung up, which the application has told
            response = error_response(NearlineError("the connection is gone"))
        else:
            log.error("request_broke", peer=request.remote, exc_info=exc)
            response = error_response(NearlineError("an internal error occurred; the controller's log has it"))
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was under way already")
        response.headers["x-request-id"] = f"http_{uuid.uuid4().hex}"
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; an exception of aiohttp's that passed all our own handlers gets our shape here."""
        if isinstance(resp, web.HTTPException):
            resp = http_error_response(resp, f"{request.method} {request.path}")
        return await super().finish_response(request, resp, start_time)


class Server(web.Server):
    """Makes a `Protocol` for every connection."""

    def __call__(self) -> web.RequestHandler:
        return Protocol(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs an application on our server."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )


def _reason(exc: BaseException | None, message: str | None) -> str:
    """The parser's complaint without the bytes it quotes, beside it or below."""
    if isinstance(exc, LineTooLong):
        return "its first line or a header is too long"
    text = (exc.message if isinstance(exc, HttpProcessingError) else message) or ""
    text = _QUOTED.sub("", text.strip()).partition("\n")[0]
    return text[:MAX_REASON].rstrip(" :.") or "it cannot be parsed"

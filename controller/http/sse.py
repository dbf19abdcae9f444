"""Server-sent events: one frame per event, a comment as a sign of life while nothing happens, an error as the last."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import structlog
from aiohttp import web

from nearline.controller.http.errors import envelope
from nearline.protocol.errors import NearlineError

T = TypeVar("T")
Event = Mapping[str, Any]

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
PEER_TIMEOUT_S = 20.0
"""A client that acknowledges or drains nothing for so long is gone."""

log = structlog.get_logger(__name__)


async def stream_events(request: web.Request, events: AsyncIterator[Event], heartbeat_s: float) -> web.StreamResponse:
    """Send events until they end, then [DONE]. An error becomes the last frame, without [DONE].

    The response begins at once, before the first event exists.
    """
    response = web.StreamResponse(headers=HEADERS)
    _drop_silent_peers(request)
    await response.prepare(request)
    await _write(response, b": ok\n\n")
    try:
        async with aclosing(with_heartbeats(events, heartbeat_s)) as beating:
            async for event in beating:
                await _write(response, b": waiting\n\n" if event is None else frame(event))
        await _write(response, DONE)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        if not isinstance(error, NearlineError):
            log.exception("stream_failed", path=request.path)
        await _write(response, frame(envelope(error)))
    with suppress(ConnectionError):
        await response.write_eof()
    return response


def frame(event: Event) -> bytes:
    """Encode one event."""
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def with_heartbeats(items: AsyncIterator[T], heartbeat_s: float) -> AsyncGenerator[T | None, None]:
    """Yield the items, and None whenever none came for `heartbeat_s`. Owns: `items`, closed when this ends."""
    pending: asyncio.Task[T] | None = None
    try:
        while True:
            pending = asyncio.ensure_future(_next(items))
            while not pending.done():
                await asyncio.wait({pending}, timeout=heartbeat_s)
                if not pending.done():
                    yield None
            try:
                item = pending.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


async def _write(response: web.StreamResponse, data: bytes) -> None:
    try:
        async with asyncio.timeout(PEER_TIMEOUT_S):
            await response.write(data)
    except TimeoutError:
        raise ConnectionResetError("the client reads nothing any more") from None


def _drop_silent_peers(request: web.Request) -> None:
    sock = request.transport.get_extra_info("socket") if request.transport else None
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PEER_TIMEOUT_S * 1000))

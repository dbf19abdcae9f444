"""Server-sent events: one frame per event, a comment as a sign of life while nothing happens, an error as the last."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

import structlog
from aiohttp import web

from nearline.controller.http.errors import envelope
from nearline.protocol.errors import NearlineError

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


async def stream_events(
    request: web.Request, events: AsyncGenerator[Event, None], heartbeat_s: float
) -> web.StreamResponse:
    """Send events until they end, then [DONE]. An error becomes the last frame, without [DONE].

    The response begins at once, before the first event exists.
    """
    await asyncio.sleep(0)  # what the request has set in motion leaves before its headers do
    response = web.StreamResponse(headers=HEADERS)
    _drop_silent_peers(request)
    await response.prepare(request)
    await _write(response, b": ok\n\n")
    heart = _Heart(request, response, heartbeat_s)
    try:
        async with aclosing(events):
            async for event in events:
                heart.rest()
                await _write(response, frame(event))
        await _write(response, DONE)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        if not isinstance(error, NearlineError):
            log.exception("stream_failed", path=request.path)
        await _write(response, frame(envelope(error)))
    finally:
        heart.stop()
    with suppress(ConnectionError):
        await response.write_eof()
    return response


def frame(event: Event) -> bytes:
    """Encode one event."""
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class _Heart:
    """Sends a comment whenever nothing was sent for `interval_s`. Owns: its timer and the comment under way.

    A client that takes none loses its connection, which cancels the handler.
    """

    def __init__(self, request: web.Request, response: web.StreamResponse, interval_s: float) -> None:
        self._request = request
        self._response = response
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None
        self._rested_at = self._loop.time()
        self._timer = self._loop.call_later(interval_s, self._beat)

    def rest(self) -> None:
        """Put the next comment off: something else is sent."""
        self._rested_at = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _beat(self) -> None:
        if self._loop.time() >= self._rested_at + self._interval_s:
            self.rest()
            if self._sending is None or self._sending.done():
                self._sending = asyncio.create_task(self._send(), name="heartbeat")
        self._timer = self._loop.call_at(self._rested_at + self._interval_s, self._beat)

    async def _send(self) -> None:
        try:
            await _write(self._response, b": waiting\n\n")
        except ConnectionError:
            if self._request.transport is not None:
                self._request.transport.abort()


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

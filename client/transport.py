"""One HTTP conversation with the platform: headers, errors as our own types, retries the server asks for, SSE."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from nearline.client.config import ClientConfig
from nearline.protocol.errors import ErrorInfo, NearlineError, StateUnavailable

MAX_BACKOFF_S = 8.0
MAX_RETRY_AFTER_S = 120.0
MAX_SSE_LINE_BYTES = 1 << 20
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds of silence before the first question, seconds between questions, and how many."""


class Transport:
    """Owns one aiohttp session, made on first use inside the running loop. Close it with `aclose`."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._session: aiohttp.ClientSession | None = None

    async def json(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, *, is_long: bool = False
    ) -> Any:
        """Send one request and return the decoded body (None when empty). Raises the server's NearlineError.

        A long one is silent until it is answered whole, however long that takes: only TCP says that the server lives.
        """
        async with self.open(method, path, body, headers, is_long=is_long) as response:
            text = await response.text()
            return json.loads(text) if text else None

    async def events(
        self, method: str, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> AsyncIterator[Any]:
        """Yield the JSON of each SSE `data:` frame until [DONE]. An `error` frame is raised as its NearlineError."""
        wanted = {"Accept": "text/event-stream", **(headers or {})}
        async with self.open(method, path, body, wanted) as response:
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if isinstance(event, dict) and event.get("error"):
                    raise error_of(event, 500)
                yield event

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, *, is_long: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a successful response. Retries refused connections never: they carry no promise to come back."""
        idle_s = None if is_long else self.config.idle_timeout_s
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self.config.connect_timeout_s, sock_read=idle_s)
        for attempt in range(self.config.max_retries + 1):
            try:
                response = await self._send(method, path, body, headers, limits)
            except aiohttp.ClientConnectorError:
                raise StateUnavailable(f"nothing answers at {self.config.url}; start it with `nearline up`") from None
            except (aiohttp.ClientError, TimeoutError) as error:
                why = str(error) or type(error).__name__
                raise StateUnavailable(f"{self.config.url}: the connection was lost ({why}); call again") from None
            async with response:
                if response.status < 400:
                    try:
                        yield response
                    except aiohttp.ClientError:
                        raise StateUnavailable(f"the answer of {self.config.url} broke off; call again") from None
                    return
                refusal = await _read_error(response)
                delay = _retry_delay(response, attempt)
            if delay is None or attempt == self.config.max_retries:
                raise refusal
            await asyncio.sleep(delay)

    async def _send(
        self, method: str, path: str, body: Any, headers: dict[str, str] | None, limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            connector = aiohttp.TCPConnector(socket_factory=watched_socket)
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=MAX_SSE_LINE_BYTES)
        sent = dict(headers or {})
        if self.config.api_key:
            sent["Authorization"] = f"Bearer {self.config.api_key}"
        return await self._session.request(method, self.config.url + path, json=body, headers=sent, timeout=limits)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket that asks a silent peer whether it is there, and breaks after about a minute without an answer."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def error_of(body: Any, status: int) -> NearlineError:
    """Turn an error envelope back into the exception it was."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return NearlineError(f"HTTP {status}: {str(body)[:300]}")
    code = str(error.get("code") or "internal_error")
    return ErrorInfo(code, str(error.get("message") or f"HTTP {status}"), error.get("param")).exception()


async def _read_error(response: aiohttp.ClientResponse) -> NearlineError:
    text = await response.text()
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    return error_of(body, response.status)


def _retry_delay(response: aiohttp.ClientResponse, attempt: int) -> float | None:
    if response.headers.get("x-should-retry") != "true":
        return None
    try:
        delay = float(response.headers.get("Retry-After", ""))
    except ValueError:
        delay = min(MAX_BACKOFF_S, 0.5 * 2**attempt)
    return delay if delay <= MAX_RETRY_AFTER_S else None

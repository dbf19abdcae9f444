"""How a running answer becomes a response: as events or in one piece, and never left running when its client goes."""

from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any, Protocol

from aiohttp import web

from nearline.controller.http.door import door_of
from nearline.controller.http.sse import stream_events


class Running(Protocol):
    """An answer under way. `close` ends it wherever it is; idempotent."""

    async def result(self) -> dict[str, Any]: ...

    def events(self) -> AsyncGenerator[dict[str, Any], None]: ...

    def close(self) -> None: ...


async def reply(request: web.Request, running: Running, is_streamed: bool) -> web.StreamResponse:
    """Answer with all there is, or event by event. Owns: `running`, closed on every way out.

    A client that leaves before the first event has begun no iterator whose end would stop anything.
    """
    with closing(running):
        if is_streamed:
            return await stream_events(request, running.events(), door_of(request).heartbeat_s)
        return web.json_response(await running.result())

"""A real HTTP server that answers as it is told, for what the real platform does too rarely to wait for."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Server:
    """`handler` answers every request; `seen` keeps (method, path, headers, body)."""

    url: str = ""
    handler: Handler | None = None
    seen: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.method, request.path_qs, dict(request.headers), await request.read()))
        assert self.handler is not None
        return await self.handler(request)


@pytest.fixture
def server() -> Iterator[Server]:
    state, loop, started = Server(), asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", state.answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        state.url = f"http://{host}:{port}"
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    yield state
    loop.call_soon_threadsafe(loop.stop)
    thread.join()

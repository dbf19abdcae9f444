"""The link to the controller: peers that fall silent, refuse or talk nonsense are noticed, and dialled again."""

import asyncio
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from structlog.testing import capture_logs

from nearline.node_agent import link as link_module
from nearline.node_agent.link import ControllerLink
from nearline.protocol import NodeId, NodeReport, encode
from nearline.protocol.frames import Report, Welcome

REPORT = Report(NodeReport(NodeId("n"), "http://n", (), 0, 0, 0, 0, (), 0.1, 0.1, 0))


class Peer:
    """A controller of which each test chooses how it treats a link."""

    def __init__(self, treat: Any) -> None:
        self.treat = treat
        self.num_links = 0

    async def __aenter__(self) -> "Peer":
        app = web.Application()
        app.router.add_get("/internal/node", self._serve)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.events: list[str] = []
        self.news = asyncio.Event()
        url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.link = ControllerLink(
            url, "t", lambda _: REPORT, lambda m: self.note(type(m).__name__), lambda: self.note("lost")
        )
        self.running = asyncio.create_task(self.link.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.runner.cleanup()

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        self.num_links += 1
        ws = web.WebSocketResponse(autoping=False)
        await ws.prepare(request)
        await ws.receive()
        await self.treat(ws, self.num_links)
        return ws

    def note(self, event: str) -> None:
        self.events.append(event)
        self.news.set()

    async def until(self, event: str, count: int) -> None:
        async with asyncio.timeout(60):
            while self.events.count(event) < count:
                self.news.clear()
                await self.news.wait()


async def answer_no_pings(ws: web.WebSocketResponse, _: int) -> None:
    await ws.send_bytes(encode(Welcome(1.0, 1)))
    await asyncio.sleep(60)


async def test_a_peer_that_falls_silent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert link_module.PATIENCE_S <= 15
    monkeypatch.setattr(link_module, "PATIENCE_S", 1.0)
    async with Peer(answer_no_pings) as peer:
        await peer.until("Welcome", 1)
        await peer.until("lost", 1)
        await peer.until("Welcome", 2)


async def test_a_peer_that_is_busy_for_some_seconds_keeps_its_link() -> None:
    async with Peer(answer_no_pings) as peer:
        await peer.until("Welcome", 1)
        await asyncio.sleep(2.5 * link_module.HEARTBEAT_S)
        assert peer.events == ["Welcome"]


async def test_answers_to_pings_keep_a_quiet_link(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer_pings(ws: web.WebSocketResponse, _: int) -> None:
        await ws.send_bytes(encode(Welcome(1.0, 1)))
        while (message := await ws.receive()).type is WSMsgType.PING:
            await ws.pong(message.data)

    monkeypatch.setattr(link_module, "PATIENCE_S", 3.0)
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.2)
    async with Peer(answer_pings) as peer:
        await peer.until("Welcome", 1)
        await asyncio.sleep(5.0)
        assert peer.events == ["Welcome"]


async def test_a_link_that_closes_is_dialled_again_quickly_for_ever() -> None:
    async def hang_up(ws: web.WebSocketResponse, _: int) -> None:
        await ws.send_bytes(encode(Welcome(1.0, 1)))
        await ws.close()

    async with Peer(hang_up) as peer:
        await peer.until("lost", 8)
    assert peer.events.count("Welcome") >= 8


async def test_nonsense_ends_the_link_and_not_the_agent() -> None:
    async def talk_nonsense(ws: web.WebSocketResponse, number: int) -> None:
        await ws.send_bytes(encode(Welcome(1.0, 1)) if number > 1 else b"\x00nonsense")
        await (ws.send_str("text") if number == 2 else asyncio.sleep(0))
        await asyncio.sleep(60 if number == 3 else 0.2)

    async with Peer(talk_nonsense) as peer:
        await peer.until("Welcome", 2)
    assert peer.events[:2] == ["Welcome", "lost"]


async def test_what_is_sent_without_a_link_is_dropped() -> None:
    link = ControllerLink("http://127.0.0.1:9", None, lambda _: REPORT, lambda _: None, lambda: None)
    for _ in range(10):
        link.send(REPORT)
    assert not link._outbox


async def test_a_leader_that_was_replaced_is_not_obeyed_again() -> None:
    """Leaders 3, 4 and then 3 again, which never noticed that it lost its lease; 5 and a new store are fine."""
    welcomes = [Welcome(1.0, 3, "d"), Welcome(1.0, 4, "d"), Welcome(1.0, 3, "d"), Welcome(1.0, 5, "d")]

    async def lead(ws: web.WebSocketResponse, number: int) -> None:
        await ws.send_bytes(encode(welcomes[number - 1] if number <= 4 else Welcome(1.0, 1, "begun anew")))

    async with Peer(lead) as peer:
        await peer.until("Welcome", 4)
        assert peer.num_links == 5, "the third was refused before anything it said was heard"
    assert peer.events[-1] == "Welcome"


@pytest.mark.parametrize(
    ("refusal", "cure"), [(web.HTTPUnauthorized, "give --token-file"), (web.HTTPNotFound, "the controller's address?")]
)
async def test_a_refused_node_says_what_to_do(refusal: type[web.HTTPException], cure: str) -> None:
    dials, is_dialled_again = [], asyncio.Event()

    async def refuse(request: web.Request) -> web.StreamResponse:
        dials.append(request)
        is_dialled_again.set() if len(dials) > 1 else None
        raise refusal

    app = web.Application()
    app.router.add_get("/internal/node", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    link = ControllerLink(url, None, lambda _: REPORT, lambda _: None, lambda: None)
    with capture_logs() as logs:
        running = asyncio.create_task(link.run())
        async with asyncio.timeout(60):
            await is_dialled_again.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await runner.cleanup()
    assert cure in logs[0]["reason"]


async def test_where_nobody_listens_the_log_asks_whether_the_address_is_right() -> None:
    link = ControllerLink("http://127.0.0.1:9", None, lambda _: REPORT, lambda _: None, lambda: None)
    with capture_logs() as logs:
        running = asyncio.create_task(link.run())
        async with asyncio.timeout(60):
            while not logs:  # noqa: ASYNC110 - nothing tells of it; the timeout ends the wait
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert "--controller" in logs[0]["reason"]

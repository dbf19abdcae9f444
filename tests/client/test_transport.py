"""A server that dies without a word, or hangs, does not hang its clients."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from nearline.client.config import ClientConfig
from nearline.client.functions import AsyncCall, AsyncFunction
from nearline.client.transport import Transport, watched_socket
from nearline.protocol.errors import StateUnavailable
from tests.client.conftest import Server

ANSWER = {"id": "r1", "model": "m", "output": {"text": "hi", "finish_reason": "stop"}, "usage": {}, "timings": {}}
IDLE_S = 2.0


@pytest.fixture
async def transport(server: Server) -> AsyncIterator[Transport]:
    made = Transport(ClientConfig(url=server.url, idle_timeout_s=IDLE_S))
    yield made
    await made.aclose()


async def test_a_stream_that_falls_silent_is_given_up(server: Server, transport: Transport) -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"delta": "par"}\n\n')
        await asyncio.sleep(600)
        return response

    server.handler = hang
    events = AsyncFunction(transport, "m").stream("x")
    assert await anext(events) == {"delta": "par"}
    with pytest.raises(StateUnavailable, match="broke off; call again"):
        await anext(events)


async def test_signs_of_life_keep_a_stream_for_as_long_as_a_cold_start_takes(
    server: Server, transport: Transport
) -> None:
    async def start_slowly(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(15):
            await asyncio.sleep(IDLE_S / 10)
            await response.write(b": waiting\n\n")
        await response.write(b'data: {"delta": "hi"}\n\ndata: [DONE]\n\n')
        return response

    server.handler = start_slowly
    assert [event["delta"] async for event in AsyncFunction(transport, "m").stream("x")] == ["hi"]


async def test_an_answer_in_one_piece_may_take_its_time_but_a_look_may_not(
    server: Server, transport: Transport
) -> None:
    async def answer_late(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(1.5 * IDLE_S)
        return web.json_response(ANSWER)

    server.handler = answer_late
    assert (await AsyncFunction(transport, "m").remote("x")).text == "hi"
    with pytest.raises(StateUnavailable, match="call again"):
        await AsyncCall(transport, "job_1").status()


def test_every_connection_asks_a_silent_peer_whether_it_lives() -> None:
    """After 30 s, and every 10 s, three times: a machine that lost its power is noticed in a minute, not in hours."""
    with watched_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [made.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [30, 10, 3]

"""Clients that leave, at any moment and in either way: nothing runs on for them."""

import asyncio
import json
import socket
import struct
from typing import Any

import pytest

from nearline.controller.http import sse
from tests.controller.http.conftest import FrontDoor, until

RST = struct.pack("ii", 1, 0)
JSON = "Content-Type: application/json\r\n"
LEAVE_AFTER_S = (0.0, 0.002, 0.008, 0.02, 0.05)
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/functions/tiny/invocations": {"prompt": "Hi"},
    "/v1/chat/completions": {"model": "tiny", "messages": HI, "n": 3},
    "/v1/completions": {"model": "tiny", "prompt": "Hi"},
    "/v1/embeddings": {"model": "tiny", "input": "Hi"},
}


async def visit(front: FrontDoor, path: str, body: dict[str, Any], stay_s: float, is_reset: bool) -> None:
    """Connect, send, and close or reset without reading."""
    loop = asyncio.get_running_loop()
    host, port = front.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {len(data)}\r\n\r\n"
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, (host, int(port)))
        await loop.sock_sendall(client, head.encode() + data)
        if stay_s:
            await asyncio.sleep(stay_s)
        if is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_cold", [False, True])
async def test_a_client_that_leaves_at_any_moment_leaves_nothing_running(
    front: FrontDoor, path: str, is_streamed: bool, is_cold: bool
) -> None:
    runtime = front.runtime
    runtime.say("word " * 200)
    runtime.step_s = 0.5
    if is_cold:
        runtime.gate.clear()
    body = {**BODIES[path], "max_tokens": 50, "stream": is_streamed}
    await front.post("/v1/functions/tiny/invocations", {"prompt": "warm"}, Invocation_Type="DryRun")
    for stay_s in LEAVE_AFTER_S:
        for is_reset in (False, True):
            await visit(front, path, body, stay_s, is_reset)
    await asyncio.sleep(0.1)
    assert runtime.handles, "no visitor stayed long enough to start anything"
    await until(lambda: all(handle.is_cancelled for handle in runtime.handles))


def with_small_buffer(request: Any) -> None:
    """What would take megabytes to fill on this machine's own loopback takes little."""
    request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


async def test_a_client_that_stays_but_reads_nothing_is_left_after_a_while(
    front: FrontDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a stopped process, or one behind a dead network: its socket is open and never drained."""
    monkeypatch.setattr(sse, "PEER_TIMEOUT_S", 0.4)
    monkeypatch.setattr(sse, "_drop_silent_peers", with_small_buffer)
    front.runtime.say("word " * 200)
    body = {**BODIES["/v1/chat/completions"], "n": 8, "stream": True, "logprobs": True, "top_logprobs": 20}
    loop = asyncio.get_running_loop()
    host, port = front.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {len(data)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        await loop.sock_connect(client, (host, int(port)))
        front.runtime.step_s = 0.02
        await loop.sock_sendall(client, head.encode() + data)
        await until(lambda: bool(front.runtime.handles))
        await until(lambda: all(handle.is_cancelled for handle in front.runtime.handles))
    value = front.door.metrics.registry.get_sample_value
    await until(lambda: not value("nearline_http_requests_in_flight"))


async def test_a_response_that_cannot_even_begin_ends_its_generation(
    front: FrontDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between the start of a generation and the first byte of its stream, held open."""
    from aiohttp import web

    async def hangs(self: web.StreamResponse, request: web.BaseRequest) -> None:
        await asyncio.sleep(60)

    front.runtime.gate.clear()
    monkeypatch.setattr(web.StreamResponse, "prepare", hangs)
    for path in ("/v1/functions/tiny/invocations", "/v1/chat/completions", "/v1/completions"):
        front.runtime.handles.clear()
        await visit(front, path, {**BODIES[path], "stream": True}, 0.1, is_reset=False)
        await until(lambda: all(handle.is_cancelled for handle in front.runtime.handles))
        assert front.runtime.handles

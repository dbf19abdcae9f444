"""What the server answers before, or instead of, a route: always our shape, never a word of its own library."""

import asyncio
import gzip
import json
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from structlog.testing import capture_logs

from nearline.controller.http.app import create_app
from nearline.controller.http.server import Protocol
from tests.controller.http.conftest import FrontDoor

BODY = b'{"prompt": "Hi"}'
POST = b"POST /v1/functions/tiny/invocations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SIZED = b"Content-Length: %d\r\n" % len(BODY)

BROKEN = {
    "unknown method": b"G\xc3\x96T / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "other version": b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "long line": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "long header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    "bad header": b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n",
    "bad length": POST + b"Content-Length: -5\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "bad chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "brotli": POST + b"Content-Encoding: br\r\n" + SIZED + b"\r\n" + BODY,
    "not gzip": POST + b"Content-Encoding: gzip\r\n" + SIZED + b"\r\n" + BODY,
    "not deflate": POST + b"Content-Encoding: deflate\r\n" + SIZED + b"\r\n" + BODY,
    "half gzip": POST + b"Content-Encoding: gzip\r\nContent-Length: 12\r\n\r\n" + gzip.compress(BODY)[:12],
    "expect": POST + b"Expect: foo\r\n" + SIZED + b"\r\n" + BODY,
    "tls": bytes.fromhex("16030100f1010000ed0303") + bytes(range(200)),
    "binary": b"\x00\x01\x02\x03\r\n\r\n",
}


async def send(front: FrontDoor, data: bytes) -> tuple[int, dict[str, str], Any]:
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    async with asyncio.timeout(60):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    writer.close()
    return int(head[0].split()[1]), headers, json.loads(body)


@pytest.mark.parametrize("name", BROKEN)
async def test_what_is_not_http_is_answered_in_the_shape_of_every_error(front: FrontDoor, name: str) -> None:
    status, headers, answer = await send(front, BROKEN[name])
    assert 400 <= status < 500
    assert headers["content-type"].startswith("application/json")
    assert headers["x-should-retry"] == "false"
    assert headers["x-request-id"]
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 300
    assert "\n" not in error["message"]
    assert front.runtime.handles == []


async def test_a_request_without_a_host_is_answered_like_any_other(front: FrontDoor) -> None:
    status, _, answer = await send(front, b"GET /health/live HTTP/1.1\r\n\r\n")
    assert (status, answer) in [(200, {"status": "live"}), (400, answer)]
    assert status == 200 or answer["error"]["type"] == "invalid_request_error"


async def test_a_gzipped_body_is_read(front: FrontDoor) -> None:
    data = gzip.compress(BODY)
    head = POST + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(data)
    assert (await send(front, head + data))[0] == 200


async def test_a_server_that_answered_nonsense_answers_the_next_client(front: FrontDoor) -> None:
    for data in BROKEN.values():
        await send(front, data)
    assert (await front.post("/v1/functions/tiny/invocations", {"prompt": "Hi"}))[0] == 200


async def test_a_client_that_hung_up_is_no_error_of_ours_in_the_log(front: FrontDoor) -> None:
    handler = Protocol(web.Server(_never), loop=asyncio.get_running_loop())
    request = make_mocked_request("GET", "/", writer=Mock(output_size=0))
    with capture_logs() as told:
        handler.handle_error(request, exc=ConnectionResetError("Cannot write to closing transport"))
    assert told == []
    with capture_logs() as told:
        handler.handle_error(request, exc=ValueError("a bug"))
    assert [entry["log_level"] for entry in told] == ["error"]


async def _never(_: web.BaseRequest) -> web.StreamResponse:
    raise AssertionError


async def test_the_root_says_what_answers_here_and_health_that_it_lives(front: FrontDoor) -> None:
    status, answer, _ = await front.get("/")
    assert (status, answer["name"]) == (200, "nearline")
    assert answer["version"][0].isdigit()
    for path in (answer["links"]["models"], answer["links"]["health"]):
        assert (await front.get(path))[0] == 200
    routes = {route.resource.canonical for route in create_app(front.door).router.routes() if route.resource}
    assert set(answer["links"].values()) <= routes
    assert {"/v1/chat/completions", "/v1/functions/{name}/invocations", "/v1/jobs"} <= set(answer["links"].values())
    assert (await front.get("/health"))[:2] == (200, {"status": "live"})
    status, answer, _ = await front.get("/nowhere")
    assert status == 404
    assert "'GET /nowhere'; GET / lists the main ones" in answer["error"]["message"]

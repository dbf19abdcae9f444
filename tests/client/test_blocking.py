"""The SDK against a real server: what it sends, what it repeats, what it raises."""

import asyncio
import gc
import itertools
import json
import threading
import time
from collections.abc import Iterator

import pytest
from aiohttp import web

from nearline.client import AsyncClient, Client
from nearline.protocol.errors import InvalidRequest, ModelNotFound, NearlineError, Overloaded, StateUnavailable
from tests.client.conftest import Server

ANSWER = {"id": "r1", "model": "m", "output": {"text": "hi", "finish_reason": "stop"}, "usage": {}, "timings": {}}


def refusal(status: int, code: str, **headers: str) -> web.Response:
    body = {"error": {"message": "why [b]", "type": "t", "param": "model", "code": code}}
    return web.json_response(body, status=status, headers=headers)


async def answered(request: web.Request) -> web.Response:
    return web.json_response(ANSWER)


def test_text_is_one_user_message_and_a_prompt_is_sent_as_it_is(server: Server) -> None:
    server.handler = answered
    with Client(server.url, api_key="key") as client:
        assert client.function("org/m").remote("hello", max_tokens=3).text == "hi"
        client.function("org/m").remote(prompt="hello")
    (method, path, headers, body), (_, _, _, raw) = server.seen
    assert (method, path) == ("POST", "/v1/functions/org/m/invocations")
    assert headers["Authorization"] == "Bearer key"
    assert json.loads(body) == {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    assert json.loads(raw) == {"prompt": "hello"}


def test_what_the_server_calls_retryable_is_repeated_after_its_delay(server: Server) -> None:
    async def busy_once(request: web.Request) -> web.StreamResponse:
        headers = {"x-should-retry": "true", "Retry-After": "0.2"}
        return refusal(429, "overloaded", **headers) if len(server.seen) == 1 else await answered(request)

    server.handler = busy_once
    started = time.monotonic()
    with Client(server.url) as client:
        assert client.function("m").remote("x").text == "hi"
    assert len(server.seen) == 2
    assert time.monotonic() - started >= 0.2


@pytest.mark.parametrize("flag", ["false", ""])
def test_what_it_does_not_is_sent_once(server: Server, flag: str) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return refusal(503, "overloaded", **({"x-should-retry": flag} if flag else {}))

    server.handler = refuse
    with Client(server.url) as client, pytest.raises(Overloaded, match="why"):
        client.function("m").remote("x")
    assert len(server.seen) == 1


def test_retries_end_with_the_servers_own_error(server: Server) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return refusal(429, "overloaded", **{"x-should-retry": "true", "Retry-After": "0"})

    server.handler = refuse
    with Client(server.url) as client, pytest.raises(Overloaded):
        client.function("m").remote("x")
    assert len(server.seen) == 3


def test_an_error_is_the_type_it_was_on_the_server(server: Server) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return refusal(404, "model_not_found")

    server.handler = refuse
    with Client(server.url) as client, pytest.raises(ModelNotFound) as caught:
        client.function("nobody").remote("x")
    assert caught.value.param == "model"


def test_an_error_that_is_no_envelope_still_says_what_came(server: Server) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=502, text="<html>Bad Gateway</html>")

    server.handler = refuse
    with Client(server.url) as client, pytest.raises(NearlineError, match=r"502.*Bad Gateway"):
        client.function("m").remote("x")


def test_nothing_listening_names_the_cure() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(StateUnavailable, match="nearline up"):
        client.function("m").remote("x")


def test_an_error_in_mid_stream_is_raised_not_swallowed(server: Server) -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b': waiting\n\ndata: {"delta": "par"}\n\n')
        await response.write(b'data: {"error": {"message": "gone", "code": "instance_failed"}}\n\n')
        return response

    server.handler = break_off
    received = []
    with Client(server.url) as client, pytest.raises(NearlineError, match="gone"):
        received.extend(event["delta"] for event in client.function("m").stream("x"))
    with Client(server.url) as client:
        assert next(client.function("m").stream("x")) == {"delta": "par"}


def test_every_spawn_carries_a_key_so_that_a_repeat_submits_once(server: Server) -> None:
    async def accept(request: web.Request) -> web.StreamResponse:
        if len(server.seen) == 1:
            return refusal(503, "state_unavailable", **{"x-should-retry": "true", "Retry-After": "0"})
        return web.json_response({"id": "job_1", "status": "queued"}, status=202)

    server.handler = accept
    with Client(server.url) as client:
        assert client.function("m").spawn("x").id == "job_1"
        client.function("m").spawn("x", idempotency_key="mine")
    keys = [headers["Idempotency-Key"] for _, _, headers, _ in server.seen]
    assert keys[0] == keys[1]
    assert keys[2] == "mine"


def test_map_keeps_the_order_of_its_texts(server: Server) -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        text = json.loads(await request.read())["messages"][0]["content"]
        return web.json_response({**ANSWER, "output": {"text": text.upper(), "finish_reason": "stop"}})

    server.handler = echo
    with Client(server.url) as client:
        texts = [f"t{i}" for i in range(40)]
        assert [output.text for output in client.function("m").map(texts, concurrency=8)] == [t.upper() for t in texts]


def numbered(taken: list[int]) -> Iterator[str]:
    """Texts without an end, each noted when it is taken."""
    for number in itertools.count():
        taken.append(number)
        yield str(number)


async def said(request: web.Request) -> web.Response:
    text = json.loads(await request.read())["messages"][0]["content"]
    return web.json_response({**ANSWER, "output": {"text": text, "finish_reason": "stop"}})


def test_map_takes_texts_as_it_needs_them(server: Server) -> None:
    server.handler = said
    taken: list[int] = []
    with Client(server.url) as client:
        outputs = client.function("m").map(numbered(taken), concurrency=4)
        for expected in range(10):
            assert next(outputs).text == str(expected)
            assert len(taken) <= expected + 1 + 16 * 4
        outputs.close()  # type: ignore[attr-defined]
        assert client.function("m").remote("after").text == "after"


async def test_so_does_its_asynchronous_twin_and_keeps_as_many_running(server: Server) -> None:
    together, at_once = asyncio.Event(), 0

    async def wait_for_all(request: web.Request) -> web.Response:
        nonlocal at_once
        at_once += 1
        if at_once == 3:
            together.set()
        await together.wait()
        return await said(request)

    server.handler = wait_for_all
    taken: list[int] = []
    async with AsyncClient(server.url) as client:
        outputs = client.function("m").map(numbered(taken), concurrency=3)
        found = [(await anext(outputs)).text for _ in range(7)]
        assert found == [str(number) for number in range(7)]
        assert len(taken) <= 7 + 16 * 3
        await outputs.aclose()  # type: ignore[attr-defined]


class SlowHead:
    """Answers what it is told at once, but the first text only when it is let go."""

    def __init__(self, refusal_of_second: str = "") -> None:
        self.num_come, self.go, self._refusal = 0, threading.Event(), refusal_of_second

    async def __call__(self, request: web.Request) -> web.Response:
        self.num_come += 1
        if self._refusal and b'"1"' in await request.read():
            return refusal(400, self._refusal)
        if b'"0"' in await request.read():
            while not self.go.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return await said(request)


def test_map_goes_on_behind_a_slow_answer_to_the_end_of_its_window(server: Server) -> None:
    server.handler = head = SlowHead()
    taken: list[int] = []

    def let_go_when_the_window_is_full() -> None:
        while head.num_come < 16 * 4:
            time.sleep(0.01)
        time.sleep(0.2)
        seen.append((head.num_come, len(taken)))
        head.go.set()

    seen: list[tuple[int, int]] = []
    watch = threading.Thread(target=let_go_when_the_window_is_full, daemon=True)
    with Client(server.url) as client:
        outputs = client.function("m").map(numbered(taken), concurrency=4)
        watch.start()
        assert [next(outputs).text for _ in range(100)] == [str(number) for number in range(100)]
        outputs.close()  # type: ignore[attr-defined]
    assert seen == [(16 * 4, 16 * 4)]


@pytest.mark.parametrize("num_ended", [0, 1, 10])
async def test_map_keeps_all_its_places_filled_behind_a_slow_answer(server: Server, num_ended: int) -> None:
    """Behind the first text some end, then all that are asked stay: as many as may are there together."""
    running: set[str] = set()

    async def stay(request: web.Request) -> web.Response:
        text = json.loads(await request.read())["messages"][0]["content"]
        if 0 < int(text) <= num_ended:
            return await said(request)
        running.add(text)
        return await asyncio.Future()

    server.handler = stay
    taken: list[int] = []
    async with AsyncClient(server.url) as client:
        first = asyncio.ensure_future(anext(client.function("m").map(numbered(taken), concurrency=4)))
        async with asyncio.timeout(30):
            while len(running) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert running == {"0", *(str(num_ended + more) for more in range(1, 4))}
        assert len(taken) == num_ended + 4
        first.cancel()


async def test_map_goes_on_while_its_outputs_are_used(server: Server) -> None:
    server.handler = said
    taken: list[int] = []
    async with AsyncClient(server.url) as client:
        outputs = client.function("m").map(numbered(taken), concurrency=2)
        assert (await anext(outputs)).text == "0"
        async with asyncio.timeout(30):
            while len(server.seen) < 1 + 16 * 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(taken) == 1 + 16 * 2
        await outputs.aclose()  # type: ignore[attr-defined]


async def test_what_fails_in_a_map_is_raised_in_its_place_and_nothing_is_started_after_it(server: Server) -> None:
    server.handler = head = SlowHead("invalid_request")
    taken: list[int] = []
    async with AsyncClient(server.url) as client:
        outputs = client.function("m").map(numbered(taken), concurrency=2)
        first = asyncio.ensure_future(anext(outputs))
        async with asyncio.timeout(30):
            while head.num_come < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        head.go.set()
        assert (await first).text == "0"
        with pytest.raises(NearlineError, match="why"):
            await anext(outputs)
        assert taken == [0, 1]

        server.handler = said

        def broken() -> Iterator[str]:
            yield "0"
            yield "1"
            raise OSError("the file ends here")

        outputs = client.function("m").map(broken(), concurrency=2)
        assert [(await anext(outputs)).text for _ in range(2)] == ["0", "1"]
        with pytest.raises(OSError, match="ends here"):
            await anext(outputs)


def test_map_of_nothing_is_nothing_and_of_nobody_is_refused(server: Server) -> None:
    with Client(server.url) as client:
        assert list(client.function("m").map([])) == []
        with pytest.raises(InvalidRequest, match="at least 1"):
            list(client.function("m").map(["a"], concurrency=0))


def test_what_was_made_from_a_client_nobody_holds_goes_on_working(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        sent = await request.read()
        if request.method == "GET":
            return web.json_response({"object": "list", "data": [], **ANSWER, "status": "succeeded"})
        if b'"stream"' not in sent:
            return await answered(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"delta": "a"}\n\ndata: {"delta": "b"}\n\ndata: [DONE]\n\n')
        return response

    server.handler = answer
    monkeypatch.setenv("NEARLINE_URL", server.url)
    mine = Client().function("mine")
    gc.collect()
    assert mine.remote("x").text == "hi"
    assert Client().function("mine").remote("x").text == "hi"
    events = []
    for event in Client().function("mine").stream("x"):
        gc.collect()
        events.append(event["delta"])
    assert events == ["a", "b"]
    call, admin = Client().call("job_1"), Client().admin
    spawned = Client().function("mine").spawn("x")
    gc.collect()
    assert call.result().text == spawned.result().text == "hi"
    assert admin.list("models") == Client().jobs() == []


def test_a_connection_ends_with_the_last_thing_that_uses_it_and_closing_it_twice_is_fine(server: Server) -> None:
    server.handler = answered
    client = Client(server.url)
    loop, function = client._loop._loop, client.function("m")
    del client
    assert function.remote("x").text == "hi"
    del function
    assert loop.is_closed()
    other = Client(server.url)
    other.close()
    other.close()
    with pytest.raises(RuntimeError, match="closed; make another"):
        other.function("m").remote("x")

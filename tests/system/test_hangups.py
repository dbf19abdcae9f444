"""People who leave: what they had asked for costs the next ones nothing, and leaves nothing behind."""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from nearline.client import Client
from tests.system.calls import call
from tests.system.conftest import RunningPlatform, eventually, register

PROMPT = "once upon a time there was a miller who had nothing but a cat and a very long story to tell about it"
ENDLESS = 100_000
"""So many tokens take minutes on the fastest of machines."""


@pytest.fixture(scope="module")
def model(platform: RunningPlatform, tiny_llama_dir: Callable[..., Path]) -> Iterator[str]:
    with platform.client() as client:
        register(client, "left", tiny_llama_dir(seed=91, max_position_embeddings=2 * ENDLESS))
        yield "left"
        client.admin.remove("models", "left")


def leave(platform: RunningPlatform, model: str, after_s: float, is_streamed: bool = True, **options: Any) -> None:
    """Ask for a long answer and close the connection after a while."""
    host, port = platform.url.removeprefix("http://").split(":")
    options = {"max_tokens": 150, "ignore_eos": True, "temperature": 0, "stream": is_streamed} | options
    data = json.dumps({"model": model, "prompt": PROMPT} | options).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        time.sleep(after_s)


def first_token_s(platform: RunningPlatform, model: str, **options: Any) -> float:
    """Ask for a stream on a connection of its own, leave at its first token; the time to it."""
    url = urlsplit(platform.url)
    body = {"max_tokens": ENDLESS, "ignore_eos": True, "temperature": 0, "stream": True} | options
    body |= {"model": model, "prompt": PROMPT}
    connection = http.client.HTTPConnection(url.hostname or "", url.port or 0, timeout=120)
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    while not answer.readline().startswith(b"data: {"):
        pass
    took = time.perf_counter() - begun
    answer.close()
    connection.close()
    return took


def is_quiet(client: Client) -> bool:
    rows = client.admin.list("instances")
    is_idle = all(row["num_running"] == row["num_waiting"] == row["kv_tokens_used"] == 0 for row in rows)
    return is_idle and not client.admin.list("queues")


def answer(platform: RunningPlatform, model: str) -> str:
    status, said = call(
        f"{platform.url}/v1/completions",
        {"model": model, "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True},
    )
    assert status == 200, said
    text: str = said["choices"][0]["text"]
    return text


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_turn_cancelled_in_the_middle_changes_no_token_of_the_next_one_and_frees_its_blocks(
    platform: RunningPlatform, model: str, is_streamed: bool
) -> None:
    fresh = answer(platform, model)
    for after_s in (0.0, 0.01, 0.03, 0.08):
        leave(platform, model, after_s, is_streamed)
        assert answer(platform, model) == fresh
    with platform.client() as client:
        assert eventually(lambda: is_quiet(client))


def test_the_first_token_after_an_abandoned_stream_comes_as_soon_as_on_an_idle_platform(
    platform: RunningPlatform, model: str
) -> None:
    """At most 1.5 times as late, and a step that is under way: the best of many, other processes delay any of them."""
    idle: list[float] = []
    after: list[float] = []

    def is_as_soon() -> bool:
        return len(after) >= 9 and min(after) <= 1.5 * min(idle) + 0.01

    with platform.client() as client:
        while not is_as_soon() and len(after) < 90:
            assert eventually(lambda: is_quiet(client))
            idle.append(first_token_s(platform, model, max_tokens=1))
            first_token_s(platform, model)
            after.append(first_token_s(platform, model, max_tokens=1))
        assert eventually(lambda: is_quiet(client), timeout_s=30.0)
    assert is_as_soon(), (idle, after)


def test_those_who_leave_while_they_wait_are_never_run(platform: RunningPlatform, model: str) -> None:
    """More than run at once, all gone before their turn: the queue is empty and the next one is served at once."""
    answer(platform, model)
    sockets = []
    host, port = platform.url.removeprefix("http://").split(":")
    data = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": ENDLESS, "ignore_eos": True, "n": 8}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    for _ in range(12):
        sockets.append(socket.create_connection((host, int(port))))
        sockets[-1].sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    time.sleep(0.05)
    for client_socket in sockets:
        client_socket.close()
    begun = time.monotonic()
    answer(platform, model)
    assert time.monotonic() - begun < 60.0, "96 endless answers were not waited for"
    with platform.client() as client:
        assert eventually(lambda: is_quiet(client))


def test_a_client_that_leaves_during_a_cold_start_leaves_a_model_that_works(
    platform: RunningPlatform, tiny_llama_dir: Callable[..., Path]
) -> None:
    with platform.client() as client:
        register(client, "left-cold", tiny_llama_dir(seed=92, max_position_embeddings=4096))
        for after_s in (0.0, 0.02, 0.1):
            leave(platform, "left-cold", after_s)
        assert len(answer(platform, "left-cold")) > 0
        assert eventually(lambda: is_quiet(client))
        client.admin.remove("models", "left-cold")

"""kill -9 anything: clients get their answer or a clear error, nothing accepted is lost, the platform comes back."""

import contextlib
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from nearline.client import Client
from nearline.protocol.errors import NearlineError
from tests.system.conftest import RunningPlatform, eventually, register

LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}


def answer_while(client: Client, name: str, disturb: Any, after: int = 5) -> str:
    """Stream a long answer; call `disturb` once when `after` events have come."""
    text = ""
    for count, event in enumerate(client.function(name).stream("go on", **LONG)):
        text += event.get("delta") or ""
        if count == after:
            disturb()
    return text


def num_descriptors(pid: int) -> int:
    return psutil.Process(pid).num_fds()


@pytest.mark.timeout(900)
def test_a_stream_survives_twenty_kills_of_the_engine(own_platform: RunningPlatform, tiny_model: Path) -> None:
    with own_platform.client() as client:
        register(client, "tiny", tiny_model)
        expected = client.function("tiny").remote("go on", **LONG).text
        (agent,), (controller,) = own_platform.pids("nearline.node_agent"), own_platform.pids("nearline.controller")
        descriptors: list[tuple[int, int]] = []
        for round_number in range(20):
            assert answer_while(client, "tiny", lambda: own_platform.kill("nearline.engine")) == expected
            if round_number in (4, 19):
                settled = lambda: len(own_platform.pids("nearline.engine")) == 2  # noqa: E731 - it and a spare
                assert eventually(settled)
                descriptors.append((num_descriptors(agent), num_descriptors(controller)))
        assert own_platform.pids("nearline.node_agent") == [agent]
        assert own_platform.pids("nearline.controller") == [controller]
        assert all(late <= early + 4 for early, late in zip(*descriptors, strict=True)), descriptors


def test_the_platform_recovers_when_the_node_agent_is_killed(own_platform: RunningPlatform, tiny_model: Path) -> None:
    with own_platform.client() as client:
        register(client, "tiny", tiny_model)
        expected = client.function("tiny").remote("go on", **LONG).text
        with contextlib.suppress(NearlineError):  # a clear error is a fair answer; a wrong or short text is not
            assert answer_while(client, "tiny", lambda: own_platform.kill("nearline.node_agent")) == expected
        assert client.function("tiny").remote("go on", **LONG).text == expected
        assert eventually(lambda: len(own_platform.pids("nearline.engine")) <= 3)


def test_jobs_finish_although_the_controller_is_killed(own_platform: RunningPlatform, tiny_model: Path) -> None:
    with own_platform.client() as client:
        register(client, "tiny", tiny_model)
        expected = client.function("tiny").remote("go on", **LONG).text
        calls = [client.function("tiny").spawn("go on", **LONG) for _ in range(12)]
        time.sleep(0.3)
        own_platform.kill("nearline.controller")
        own_platform.wait_ready()
        for call in calls:
            assert client.call(call.id).result(timeout_s=120).text == expected
            assert client.call(call.id).status()["status"] == "succeeded"
        assert client.function("tiny").remote("go on", **LONG).text == expected


def test_a_client_of_a_killed_controller_gets_a_clear_error(own_platform: RunningPlatform, tiny_model: Path) -> None:
    with own_platform.client() as client:
        register(client, "tiny", tiny_model)
        with pytest.raises(NearlineError):
            answer_while(client, "tiny", lambda: own_platform.kill("nearline.controller"))
        own_platform.wait_ready()
        assert [row["id"] for row in client.admin.list("models")] == ["tiny"]


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_client_that_hangs_up_frees_its_sequence(
    platform: RunningPlatform, tiny_llama_dir: Callable[..., Path], is_streaming: bool
) -> None:
    """It would generate for minutes."""
    with platform.client() as client:
        register(client, "hangup", tiny_llama_dir(seed=1, max_position_embeddings=200_000), replace=True)
        client.function("hangup").remote("warm", max_tokens=1)
        _hang_up_after(platform.url, "hangup", is_streaming, seconds=0.3)
        rows = lambda: [r for r in client.admin.list("instances") if r["model"] == "hangup"]  # noqa: E731
        assert eventually(lambda: all(r["num_running"] == 0 for r in rows()), timeout_s=30)


def _hang_up_after(url: str, model: str, is_streaming: bool, seconds: float) -> None:
    import json
    import socket
    from urllib.parse import urlparse

    address = urlparse(url)
    body = json.dumps({"prompt": "go on", "max_tokens": 100_000, "ignore_eos": True, "stream": is_streaming}).encode()
    head = f"POST /v1/functions/{model}/invocations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(seconds)


def test_fifty_clients_at_a_cold_model_cause_one_load(platform: RunningPlatform, tiny_model: Path) -> None:
    with platform.client() as client:
        register(client, "herd", tiny_model)
        answers: list[str] = []

        def ask() -> None:
            with platform.client() as mine:
                answers.append(mine.function("herd").remote("hi", max_tokens=4, temperature=0).text)

        threads = [threading.Thread(target=ask) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 50
        assert len(set(answers)) == 1
        assert len([r for r in client.admin.list("instances") if r["model"] == "herd"]) == 1


def test_health_stays_green_and_metrics_name_the_cold_start(platform: RunningPlatform) -> None:
    with urllib.request.urlopen(f"{platform.url}/health/live", timeout=60) as response:
        assert response.status == 200
    with urllib.request.urlopen(f"{platform.url}/metrics", timeout=60) as response:
        text = response.read().decode()
    assert "vllm:time_to_first_token_seconds" in text
    assert "nearline_cold_starts_total" in text

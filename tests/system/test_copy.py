"""A second machine joins, gets a model's bytes from the first, and serves it when the first is gone."""

import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nearline.protocol.errors import InvalidRequest, NotFound
from tests.system.conftest import RunningPlatform, eventually, register, running


@contextlib.contextmanager
def second_node(platform: RunningPlatform, data_dir: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "nearline.node_agent", "--controller", platform.url, "--data-dir", str(data_dir)]
    command += flags
    command += ["--node-id", "second", "--pool-bytes", "64MiB", "--slots", "1", "--prewarm", "1"]
    tokens = list(platform.data_dir.rglob("*token*"))
    command += ["--token-file", str(tokens[0])] if tokens else []
    with (data_dir.parent / "second.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_a_second_replica_that_must_be_there_starts_on_a_node_that_did_not_have_the_bytes(
    tmp_path: Path, tiny_llama_dir: Callable[..., Path]
) -> None:
    with running(tmp_path / "data", "--slots", "1") as platform, platform.client() as client:
        register(client, "m", tiny_llama_dir(seed=79), min_replicas=2, max_replicas=2)

        def instances() -> list[tuple[str, str]]:
            return sorted((row["node"], row["state"]) for row in client.admin.list("instances"))

        assert eventually(lambda: [state for _, state in instances()] == ["ready"], 60)
        shown = client.admin.show("models", "m")
        assert (shown["num_missing"], "no other node" in shown["missing_because"]) == (1, True)
        assert "1 of m's replicas is missing: " in nearline(platform, "ps")
        with second_node(platform, tmp_path / "second"):
            assert eventually(lambda: ("second", "ready") in instances(), 60), client.admin.show("models", "m")
            assert client.admin.show("models", "m")["num_missing"] == 0
            assert "missing" not in nearline(platform, "ps")


def nearline(platform: RunningPlatform, *words: str) -> str:
    command = [sys.executable, "-m", "nearline", *words, "--url", platform.url]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_a_model_copied_to_another_node_is_served_there_when_the_first_has_gone(
    own_platform: RunningPlatform, tmp_path: Path, tiny_llama_dir: Callable[..., Path]
) -> None:
    platform = own_platform
    with platform.client() as client:
        row = register(client, "m", tiny_llama_dir(seed=78), keep_alive_s=0)
        answer = client.function("m").remote("hello", max_tokens=3, temperature=0).text
    with platform.client() as client, second_node(platform, tmp_path / "second"):
        assert eventually(lambda: len(client.admin.list("nodes")) == 2)
        *progress, result = client.admin.copy("models", "m")
        assert progress
        assert (result["node"], result["num_bytes"]) == ("second", row["num_bytes"]), "the first was there first"
        with pytest.raises(InvalidRequest, match="every connected node has this checkpoint already"):
            list(client.admin.copy("models", "m"))
        with pytest.raises(NotFound, match="no node is named 'nowhere'"):
            list(client.admin.copy("models", "m", "nowhere"))
        with pytest.raises(InvalidRequest, match="nearline model copy"):
            register(client, "stolen", Path(f"peer:{row['digest']}@http:/somewhere"))
        platform.kill("nearline.node_agent")
        assert client.function("m").remote("hello", max_tokens=3, temperature=0).text == answer


def test_an_open_platform_gives_its_bytes_to_a_node_that_knows_it_by_another_address(
    tmp_path: Path, tiny_llama_dir: Callable[..., Path]
) -> None:
    """127.0.0.2 stands for the first machine as the second one sees it."""
    with running(tmp_path / "data", "--host", "0.0.0.0") as platform, platform.client() as client:
        register(client, "m", tiny_llama_dir(seed=79), keep_alive_s=0)
        own = client.admin.list("nodes")[0]["http_url"].replace("127.0.0.1", "127.0.0.2")
        with urllib.request.urlopen(f"{own}/health", timeout=60) as response:
            assert response.status == 200, "other machines reach the first one's node"
        outside = platform.url.replace("127.0.0.1", "127.0.0.2")
        with second_node(platform, tmp_path / "second", "--controller", outside, "--host", "127.0.0.3"):
            assert eventually(lambda: len(client.admin.list("nodes")) == 2)
            *_, result = client.admin.copy("models", "m")
            assert result["node"] == "second"

"""A second machine joins, gets a model's bytes from the first, and serves it when the first is gone."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nearline.protocol.errors import InvalidRequest, NotFound
from tests.system.conftest import RunningPlatform, eventually, register


@contextlib.contextmanager
def second_node(platform: RunningPlatform, data_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "nearline.node_agent", "--controller", platform.url, "--data-dir", str(data_dir)]
    command += ["--node-id", "second", "--pool-bytes", "64MiB", "--slots", "1", "--prewarm", "1"]
    tokens = list(platform.data_dir.rglob("*token*"))
    command += ["--token-file", str(tokens[0])] if tokens else []
    with (data_dir.parent / "second.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_a_model_copied_to_another_node_is_served_there_when_the_first_has_gone(
    own_platform: RunningPlatform, tmp_path: Path, tiny_llama_dir: Callable[..., Path]
) -> None:
    platform = own_platform
    with platform.client() as client:
        row = register(client, "m", tiny_llama_dir(seed=78), keep_alive_s=0)
        answer = client.function("m").remote("hello", max_tokens=3, temperature=0).text
    with platform.client() as client, second_node(platform, tmp_path / "second"):
        assert eventually(lambda: len(client.admin.list("nodes")) == 2, 30)
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

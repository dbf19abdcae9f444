"""Bytes looked after from the outside: verified, evicted, found damaged, imported again."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nearline.protocol.errors import CheckpointCorrupt, CheckpointUnreadable, ModelNotFound
from tests.system.conftest import RunningPlatform, eventually, register


def command(platform: RunningPlatform, *words: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "nearline", *words, "--url", platform.url]
    return subprocess.run(whole, capture_output=True, text=True, timeout=180, check=False)


def test_a_model_is_verified_evicted_found_damaged_and_healed_by_importing_it_again(
    platform: RunningPlatform, tiny_llama_dir: Callable[..., Path]
) -> None:
    source = tiny_llama_dir(seed=77)
    with platform.client() as client:
        row = register(client, "care", source, keep_alive_s=0)
        *progress, result = client.admin.verify("models", "care")
        assert progress[-1]["done_bytes"] == progress[-1]["total_bytes"] == row["num_bytes"]
        assert result["is_valid"]
        assert result["num_bytes"] == row["num_bytes"]
        assert result["bytes_per_s"] == pytest.approx(result["num_bytes"] / result["seconds"])
        answer = client.function("care").remote("hello", max_tokens=3, temperature=0).text
        assert eventually(lambda: client.admin.show("models", "care")["num_instances"] == 0)
        assert client.admin.evict("care") > 0
        assert client.admin.evict("care") == 0
        assert client.admin.show("models", "care")["tier"] == "ssd"

        (weights,) = platform.data_dir.glob(f"**/checkpoints/{row['digest']}/model.safetensors")
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        with pytest.raises(CheckpointCorrupt, match=r"chunks are wrong: chunk 0"):
            list(client.admin.verify("models", "care"))
        with pytest.raises(CheckpointUnreadable, match="import it again"):
            client.function("care").remote("hello", max_tokens=3, temperature=0)
        client.admin.remove("models", "care")
        assert eventually(lambda: not weights.exists())
        register(client, "care", source, keep_alive_s=0)
        assert client.function("care").remote("hello", max_tokens=3, temperature=0).text == answer
        client.admin.remove("models", "care")
        with pytest.raises(ModelNotFound, match="no model is named 'care'"):
            list(client.admin.verify("models", "care"))


def test_a_profile_is_taken_of_a_model_that_sleeps_and_shown_afterwards(
    platform: RunningPlatform, tiny_llama_dir: Callable[..., Path]
) -> None:
    with platform.client() as client:
        register(client, "paced", tiny_llama_dir(seed=79))
        assert client.admin.show("models", "paced")["profiles"] == {}
    plain = json.loads(command(platform, "profile", "paced", "--json").stdout)
    assert plain["num_steps"] >= 8
    assert plain["model"]["decode_base_s"] + plain["model"]["decode_per_sequence_s"] > 0
    with platform.client() as client:
        assert list(client.admin.show("models", "paced")["profiles"]) == [plain["node"]]
    done = command(platform, "profile", "paced")
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    with platform.client() as client:
        client.admin.remove("models", "paced")


def test_the_commands_say_what_they_did_and_fail_with_status_1(
    platform: RunningPlatform, tiny_llama_dir: Callable[..., Path]
) -> None:
    with platform.client() as client:
        register(client, "org/kept", tiny_llama_dir(seed=78))
    done = command(platform, "model", "verify", "org/kept")
    assert done.returncode == 0, done.stderr
    assert "org/kept is whole" in done.stdout
    plain = json.loads(command(platform, "model", "verify", "org/kept", "--json").stdout)
    assert plain["nodes"][0]["num_bytes"] == plain["num_bytes"]
    assert json.loads(command(platform, "model", "evict", "org/kept", "--json").stdout)["id"] == "org/kept"
    failed = command(platform, "adapter", "verify", "org/kept")
    assert failed.returncode == 1
    assert "no adapter is named 'org/kept'" in failed.stderr
    with platform.client() as client:
        client.admin.remove("models", "org/kept")

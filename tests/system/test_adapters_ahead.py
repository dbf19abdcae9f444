"""Adapters that are called often are on the device of a new instance before anybody calls them there."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nearline.client import Client
from nearline.protocol.errors import ModelNotFound
from tests.system.conftest import RunningPlatform, eventually, register, running
from tests.system.test_journey import _text, complete, expected_tokens

BASE = "org/host"
IDS = [(7 * i) % 199 + 1 for i in range(48)]


@pytest.fixture(scope="module")
def model_dir(tiny_llama_dir: Callable[..., Path]) -> Path:
    return tiny_llama_dir(seed=9, initializer_range=0.3)


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four adapters of one base as peft writes them."""
    from peft import LoraConfig, get_peft_model

    made = {}
    for seed, name in enumerate("ABCD"):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
        made[name] = tmp_path_factory.mktemp("peft") / name
        get_peft_model(model, config).save_pretrained(str(made[name]))
    return made


@pytest.fixture
def hosted(tmp_path: Path, model_dir: Path, adapters: dict[str, Path]) -> Iterator[tuple[RunningPlatform, Client]]:
    with running(tmp_path / "data", "--slots", "1") as platform, platform.client() as client:
        register(client, BASE, model_dir, keep_alive_s=300)
        for name in "ABC":
            register(client, name, adapters[name], base=BASE)
        yield platform, client


def ask(platform: RunningPlatform, name: str) -> str:
    body = {"model": name, "prompt": IDS, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    text: str = complete(f"{platform.url}/v1/completions", **body)["choices"][0]["text"]
    return text


def num_there(client: Client) -> int:
    """Adapters on the device of the one instance there is; -1: none has all its bytes."""
    rows = [row for row in client.admin.list("instances") if row["state"] == "ready"]
    return int(rows[0]["num_adapters"]) if len(rows) == 1 else -1


def test_a_new_instance_has_what_is_called_often_before_it_is_called_and_never_what_was_replaced(
    hosted: tuple[RunningPlatform, Client], adapters: dict[str, Path], model_dir: Path
) -> None:
    platform, client = hosted
    before = {name: [ask(platform, name) for _ in range(times)] for name, times in (("A", 3), ("B", 3), ("C", 1))}
    assert num_there(client) == 3
    platform.kill("nearline.engine")
    ask(platform, BASE)
    assert eventually(lambda: num_there(client) == 2), "A and B, that nobody has called there"
    register(client, "A", adapters["D"], base=BASE, replace=True)
    assert ask(platform, "A") == _text(model_dir, expected_tokens(model_dir, IDS, 8, adapters["D"]))
    assert num_there(client) >= 2
    client.admin.remove("adapters", "C")
    with pytest.raises(ModelNotFound):
        client.function("C").remote("hi")
    register(client, "A", adapters["A"], base=BASE, replace=True)
    for name in "AB":
        assert {ask(platform, name)} == {*before[name]}
        assert ask(platform, name) == _text(model_dir, expected_tokens(model_dir, IDS, 8, adapters[name]))

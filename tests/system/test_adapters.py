"""Adapters over real HTTP: registered, replaced and removed while others answer; peft says what each must say."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nearline.client import Client
from nearline.protocol.errors import AdapterMismatch, ModelNotFound, NearlineError
from tests.system.conftest import RunningPlatform, register
from tests.system.test_journey import _text, complete, expected_tokens

BASE = "org/host"
IDS = [(7 * i) % 199 + 1 for i in range(48)]


@pytest.fixture(scope="module")
def model_dir(tiny_llama_dir: Callable[..., Path]) -> Path:
    return tiny_llama_dir(seed=9, max_position_embeddings=4096, initializer_range=0.3)


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Six adapters of one base as peft writes them."""
    from peft import LoraConfig, get_peft_model

    made = {}
    for seed, name in enumerate("ABCDEF"):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        config = LoraConfig(
            r=2 + seed, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, use_dora=name == "D"
        )
        made[name] = tmp_path_factory.mktemp("peft") / name
        get_peft_model(model, config).save_pretrained(str(made[name]))
    return made


@pytest.fixture(scope="module")
def hosted(platform: RunningPlatform, model_dir: Path, adapters: dict[str, Path]) -> Iterator[Client]:
    with platform.client() as client:
        register(client, BASE, model_dir, keep_alive_s=300)
        register(client, "A", adapters["A"], base=BASE)
        yield client
        for row in client.admin.list("adapters"):
            if row["base"] == BASE:
                client.admin.remove("adapters", row["id"])
        client.admin.remove("models", BASE)


def ask(platform: RunningPlatform, name: str, num_tokens: int = 12) -> str:
    body = {"model": name, "prompt": IDS, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    text: str = complete(f"{platform.url}/v1/completions", **body)["choices"][0]["text"]
    return text


def test_registering_replacing_and_removing_others_changes_no_token_of_a_running_answer(
    platform: RunningPlatform, hosted: Client, adapters: dict[str, Path]
) -> None:
    solo = ask(platform, "A", 400)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, platform, "A", 400) for _ in range(3)]
        for name in "BCD":
            register(hosted, "other", adapters[name], base=BASE, replace=True)
            ask(platform, "other", 2)
        hosted.admin.remove("adapters", "other")
        assert [answer.result(60) for answer in answers] == [solo] * 3


def test_a_replaced_adapter_answers_with_its_new_weights_at_once(
    platform: RunningPlatform, hosted: Client, adapters: dict[str, Path], model_dir: Path
) -> None:
    register(hosted, "versioned", adapters["B"], base=BASE)
    first = ask(platform, "versioned")
    assert ask(platform, "versioned") == first
    register(hosted, "versioned", adapters["C"], base=BASE, replace=True)
    second = ask(platform, "versioned")
    for answer, name in ((first, "B"), (second, "C")):
        assert answer == _text(model_dir, expected_tokens(model_dir, IDS, 12, adapters[name]))
    register(hosted, "plain", adapters["C"], base=BASE)
    assert ask(platform, "plain") == ask(platform, f"{BASE}:versioned") == second
    hosted.admin.remove("adapters", "versioned")
    assert ask(platform, "plain") == second, "the same bytes under another name stay"
    with pytest.raises(ModelNotFound):
        hosted.function("versioned").remote("hi")
    hosted.admin.remove("adapters", "plain")


def test_fifty_first_requests_at_once_are_all_answered_alike(
    platform: RunningPlatform, hosted: Client, adapters: dict[str, Path]
) -> None:
    register(hosted, "fresh", adapters["E"], base=BASE)
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: ask(platform, "fresh", 6), range(50)))
    assert len(set(answers)) == 1
    assert answers[0] != ask(platform, BASE, 6)
    hosted.admin.remove("adapters", "fresh")


def test_an_adapter_whose_files_vanish_fails_its_requests_and_nobody_elses(
    platform: RunningPlatform, hosted: Client, adapters: dict[str, Path]
) -> None:
    row = register(hosted, "doomed", adapters["F"], base=BASE)
    (directory,) = platform.data_dir.glob(f"**/checkpoints/{row['digest']}")
    hidden = directory.rename(directory.with_name("hidden"))
    try:
        solo = ask(platform, "A")
        with pytest.raises(NearlineError) as failed:
            hosted.function("doomed").remote(prompt="hi", max_tokens=2)
        assert not isinstance(failed.value, ModelNotFound)
        assert ask(platform, "A") == solo
    finally:
        hidden.rename(directory)
    hosted.admin.remove("adapters", "doomed")


def test_what_does_not_fit_its_base_is_refused_at_registration(
    platform: RunningPlatform, hosted: Client, adapters: dict[str, Path], tiny_llama_dir: Callable[..., Path]
) -> None:
    register(hosted, "small", tiny_llama_dir(seed=3, hidden_size=32, intermediate_size=48))
    with pytest.raises(AdapterMismatch, match="was it trained on another model"):
        register(hosted, "A2", adapters["A"], base="small")
    with pytest.raises(ModelNotFound, match="add the base"):
        register(hosted, "A2", adapters["A"], base="nobody")
    hosted.admin.remove("models", "small")

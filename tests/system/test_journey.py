"""From registered to answering, through every process, on real HTTP."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from nearline.protocol.errors import ContextLengthExceeded, ModelNotFound
from tests.system.conftest import RunningPlatform, eventually, register


def expected_tokens(directory: Path, prompt_ids: list[int], num_tokens: int, adapter: Path | None = None) -> list[int]:
    """What transformers (and peft) generate greedily."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    output = model.generate(
        input_ids=torch.tensor([prompt_ids]),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt_ids) :].tolist()
    return tokens


def complete(url: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


@pytest.fixture(scope="module")
def registered(platform: RunningPlatform, tiny_model: Path) -> str:
    with platform.client() as client:
        register(client, "org/tiny", tiny_model, keep_alive_s=300)
    return "org/tiny"


def test_a_cold_model_answers_what_transformers_answers(
    platform: RunningPlatform, registered: str, tiny_model: Path
) -> None:
    prompt = list(b"Hello there")
    ids = [_byte_id(tiny_model, byte) for byte in prompt]
    body = {"model": registered, "prompt": ids, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    answer = complete(f"{platform.url}/v1/completions", **body)
    expected = expected_tokens(tiny_model, ids, 24)
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["text"] == _text(tiny_model, expected)


def _byte_id(directory: Path, byte: int) -> int:
    from tokenizers import Tokenizer

    (identifier,) = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(chr(byte)).ids
    return identifier


def _text(directory: Path, ids: list[int]) -> str:
    from tokenizers import Tokenizer

    return str(Tokenizer.from_file(str(directory / "tokenizer.json")).decode(ids))


def test_a_name_with_a_slash_works_on_every_route(platform: RunningPlatform, registered: str) -> None:
    with platform.client() as client:
        output = client.function(registered).remote("hi", max_tokens=3, temperature=0)
        assert output.usage["completion_tokens"] >= 1
        assert client.admin.show("models", registered)["id"] == registered
    for form in ("org/tiny", "org%2Ftiny"):
        with urllib.request.urlopen(f"{platform.url}/v1/models/{form}", timeout=60) as response:
            assert json.load(response)["id"] == registered


def test_the_openai_client_streams_and_counts(platform: RunningPlatform, registered: str) -> None:
    client = openai.OpenAI(base_url=f"{platform.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=registered, messages=[{"role": "user", "content": "hi"}], max_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-2].choices[0].finish_reason == "length"


def test_the_waterfall_says_where_a_cold_start_went(
    platform: RunningPlatform, tiny_llama_dir: Callable[..., Path]
) -> None:
    with platform.client() as client:
        register(client, "cold", tiny_llama_dir(seed=5), keep_alive_s=0.5)
        cold = client.function("cold").remote("hi", max_tokens=2).timings
        warm = client.function("cold").remote("hi", max_tokens=2).timings
        assert cold["is_cold"] is True
        assert warm["is_cold"] is False
        assert cold["first_token_s"] > cold["prefill_s"] > 0
        asleep = lambda: "cold" not in {row["model"] for row in client.admin.list("instances")}  # noqa: E731
        assert eventually(asleep)
        again = client.function("cold").remote("hi", max_tokens=2).timings
        assert (again["is_cold"], again["tier"]) == (True, "dram")


def test_what_cannot_be_served_is_refused_clearly(platform: RunningPlatform, registered: str) -> None:
    with platform.client() as client:
        with pytest.raises(ModelNotFound, match="nobody"):
            client.function("nobody").remote("hi")
        with pytest.raises(ContextLengthExceeded, match="4096"):
            client.function(registered).remote(prompt="x" * 5000)


def test_a_job_outlives_its_submitter(platform: RunningPlatform, registered: str) -> None:
    with platform.client() as client:
        call = client.function(registered).spawn("hi", max_tokens=5, temperature=0)
    with platform.client() as another:
        output = another.call(call.id).result(timeout_s=90)
        assert output.text == another.function(registered).remote("hi", max_tokens=5, temperature=0).text
        assert call.id in [job["id"] for job in another.jobs()]


def test_an_adapter_answers_what_peft_answers(
    platform: RunningPlatform, registered: str, tiny_model: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    with platform.client() as client:
        register(client, "styled", adapter, base=registered)
    ids = [_byte_id(tiny_model, byte) for byte in b"Hello there"]
    body = {"prompt": ids, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    for name in ("styled", f"{registered}:styled"):
        answer = complete(f"{platform.url}/v1/completions", model=name, **body)
        assert answer["choices"][0]["text"] == _text(tiny_model, expected_tokens(tiny_model, ids, 24, adapter))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        complete(f"{platform.url}/v1/completions", model=f"{registered}:nobody", **body)


def make_adapter(base: Path, directory: Path) -> Path:
    """A random rank-4 adapter, strong enough to change every token."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(directory)
    return directory

"""Every sampling option through the front door, prompts scored and embedded, and answers bound to grammars."""

import base64
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.system.calls import WAYS, Way, call
from tests.system.conftest import RunningPlatform, register

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}}
PROMPT = [(7 * i) % 250 for i in range(60)]


class Asked:
    """The model under test, and how to ask it."""

    def __init__(self, platform: RunningPlatform, directory: Path) -> None:
        self.platform, self.model = platform, "sampling"
        self.oracle: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with platform.client() as client:
            register(client, self.model, directory, keep_alive_s=300, replace=True)

    def post(self, path: str = "completions", **body: Any) -> tuple[int, Any]:
        given = {"prompt": PROMPT, "max_tokens": 12} if path == "completions" else {}
        return call(f"{self.platform.url}/v1/{path}", {"model": self.model} | given | body)

    def text(self, **body: Any) -> str:
        status, answer = self.post(**body)
        assert status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text

    def together(self, bodies: list[dict[str, Any]]) -> list[str]:
        found: dict[int, str] = {}

        def ask(index: int) -> None:
            found[index] = self.text(**bodies[index])

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[index] for index in range(len(bodies))]


@pytest.fixture(scope="module")
def asked(platform: RunningPlatform, tiny_model: Path) -> Asked:
    return Asked(platform, tiny_model)


def test_a_seed_gives_the_same_text_alone_in_a_batch_of_eight_and_as_a_choice(asked: Asked) -> None:
    bodies = [{"seed": seed, "temperature": 1.0, "top_p": 0.95, "ignore_eos": True} for seed in range(8)]
    alone = [asked.text(**body) for body in bodies]
    assert len(set(alone)) > 4
    assert asked.together(bodies) == alone
    _, answer = asked.post(n=3, **bodies[2])
    assert [choice["text"] for choice in answer["choices"]] == alone[2:5]


def test_lengths_and_ends_are_what_was_asked(asked: Asked) -> None:
    eos = {"logit_bias": {"258": 100}, "temperature": 0}
    for options, expected in (
        ({}, (1, "stop")),
        ({"ignore_eos": True}, (12, "length")),
        ({"min_tokens": 5}, (6, "stop")),
        ({"min_tokens": 12}, (12, "length")),
        ({"max_tokens": 3, "ignore_eos": True}, (3, "length")),
    ):
        _, answer = asked.post(**eos, **options)
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == expected, options
    status, answer = asked.post(min_tokens=13)
    assert (status, answer["error"]["param"]) == (400, "min_tokens")
    _, answer = asked.post(logit_bias={"65": 100}, stop_token_ids=[65], temperature=0)
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 1)


def test_filters_that_leave_one_token_are_greedy_and_penalties_move_it(asked: Asked) -> None:
    base = {"ignore_eos": True, "max_tokens": 30}
    greedy = asked.text(temperature=0, **base)
    for options in ({"top_k": 1}, {"top_p": 0}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}):
        assert asked.text(**({"temperature": 1.5} | base | options), seed=3) == greedy, options
    assert asked.text(temperature=0, logit_bias={"66": 100}, **base) == asked.text(logit_bias={"66": 100}, **base)
    for options in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 5}):
        assert asked.text(temperature=0, **base, **options) != greedy, options
    for name, value in (("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("logit_bias", {"272": 1})):
        status, answer = asked.post(**{name: value})
        assert (status, answer["error"]["param"]) == (400, name)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompts_are_scored_as_transformers_scores_them(asked: Asked, max_tokens: int) -> None:
    long = [(11 * i) % 250 for i in range(900)]  # more than a step, and known from the time before
    options = {"max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0, "ignore_eos": True}
    _, answer = asked.post(prompt=[PROMPT, long], **options)
    for ids, choice in zip((PROMPT, long), answer["choices"], strict=True):
        with torch.inference_mode():
            exact = asked.oracle(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        scored = choice["logprobs"]
        assert len(scored["tokens"]) == len(ids) + max_tokens
        assert scored["token_logprobs"][0] is None
        expected = [float(row[token]) for row, token in zip(exact, ids[1:], strict=False)]
        assert scored["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        tops = [max(top.values()) for top in scored["top_logprobs"][1:]]
        assert tops == pytest.approx(exact.max(-1).values[: len(tops)].tolist(), abs=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_transformers_hidden_states_while_others_generate(asked: Asked, pooling: str) -> None:
    inputs = [PROMPT[:n] for n in (1, 7, 60)] * 4
    found: dict[str, Any] = {}
    options = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    alone = asked.text(**options)
    other = threading.Thread(target=lambda: found.update(text=asked.text(**options)))
    other.start()
    _, answer = asked.post("embeddings", input=inputs, pooling=pooling, encoding_format="base64", dimensions=24)
    other.join()
    assert found["text"] == alone
    for ids, row in zip(inputs, answer["data"], strict=True):
        with torch.inference_mode():
            states = asked.oracle.model(torch.tensor([ids])).last_hidden_state[0].double()
        exact = (states[-1] if pooling == "last" else states.mean(0)).numpy()[:24]
        vector = np.frombuffer(base64.b64decode(row["embedding"]), "<f4")
        assert vector == pytest.approx(exact / np.linalg.norm(exact), abs=1e-4)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_answers_keep_to_their_grammar_on_every_endpoint(asked: Asked, way: Way) -> None:
    text, reason = way.ask(asked.platform.url, asked.model, seed=2, max_tokens=600, **FORMAT)
    value = json.loads(text)
    assert reason == "stop"
    assert value.keys() == {"name", "age"}
    assert 0 <= value["age"] <= 99
    assert way.ask(asked.platform.url, asked.model, guided_choice=["oui", "non"])[0] in ("oui", "non")
    text, _ = way.ask(asked.platform.url, asked.model, guided_grammar='start: "<" /[a-f]{4}/ ">"')
    assert re.fullmatch("<[a-f]{4}>", text)
    cut = way.ask(asked.platform.url, asked.model, guided_regex="[0-9]{40}", max_tokens=7)
    assert (len(cut[0]), cut[1]) == (7, "length")


def test_bad_grammars_harm_neither_the_engine_nor_the_answers_of_others(asked: Asked) -> None:
    options = {"temperature": 0, "ignore_eos": True, "max_tokens": 60}
    before, engines = asked.text(**options), asked.platform.pids("nearline.engine")
    bad: list[dict[str, Any]] = [
        {"guided_regex": "("}, {"guided_grammar": "start: nobody"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "blob"}}}},
    ]  # fmt: skip
    good: list[dict[str, Any]] = [{"guided_regex": "[xyz]{30}"}, FORMAT, {"guided_choice": ["a"]}]
    for order in (bad + good, good + bad):
        for fields in order:
            status, answer = asked.post(**fields)
            assert status == (400 if fields in bad else 200), answer
            assert fields in good or answer["error"]["param"]
    bodies: list[dict[str, Any]] = [options, *good, options, {**options, "guided_regex": "[01]{60}"}]
    texts = asked.together(bodies)
    assert texts[0] == texts[4] == before == asked.text(**options)
    assert re.fullmatch("[01]{60}", texts[-1])
    assert set(engines) <= set(asked.platform.pids("nearline.engine"))  # another may have been pre-warmed since

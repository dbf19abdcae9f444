"""What is read of a prompt: its tokens' log-probabilities and its vector, as transformers has them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nearline.engine.sequence import Sequence
from nearline.engine.types import SampledToken
from nearline.protocol import ModelId, Pooling, Request, RequestId, SamplingParams

SCORED = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model("Qwen3")


@pytest.fixture
def harness(model: Any, bind: Callable[..., Any]) -> Any:
    return bind(model)


def reading(tokens: list[int], sampling: SamplingParams = SCORED, pooling: Pooling | None = None) -> Sequence:
    request = Request(RequestId("r"), ModelId("m"), tuple(tokens), sampling, pooling=pooling)
    return Sequence(request, 1, list(tokens), arrived_at=0.0)


def embedded(tokens: list[int], pooling: Pooling) -> Sequence:
    return reading(tokens, SamplingParams(max_tokens=0), pooling)


def vector(outcome: SampledToken) -> Any:
    assert outcome.embedding is not None
    return pytest.approx(np.frombuffer(outcome.embedding, "<f4"), abs=1e-5)


def run(harness: Any, *sequences: Sequence, chunk: int = 1 << 30) -> list[SampledToken]:
    """Run prompts together to their outcomes."""
    outcomes: dict[int, SampledToken] = {}
    while left := [s for s in sequences if id(s) not in outcomes]:
        items = []
        for sequence in left:
            num_tokens = min(chunk, sequence.num_uncomputed)
            items.append((sequence, num_tokens == sequence.num_uncomputed))
        found = harness.step([s for s, _ in items], chunk)
        outcomes |= {id(s): o for s, o in zip([s for s, is_last in items if is_last], found, strict=True)}
    for sequence in sequences:
        harness.release(sequence)
        del sequence.token_ids[sequence.num_prompt :]
    return [outcomes[id(sequence)] for sequence in sequences]


@pytest.mark.parametrize("chunk", [1 << 30, 7, 1])
def test_prompt_logprobs_are_those_of_transformers_however_the_prompt_is_cut(
    harness: Any, model: Any, prompt: Any, oracle_logits: Any, chunk: int
) -> None:
    tokens = prompt(80 if chunk > 1 else 9)
    exact = oracle_logits(model, tokens).double().log_softmax(-1)[:-1]
    (outcome,) = run(harness, reading(tokens), chunk=chunk)
    assert len(outcome.prompt_logprobs) == len(tokens) - 1
    expected = [float(row[token]) for row, token in zip(exact, tokens[1:], strict=True)]
    assert [one.logprob for one in outcome.prompt_logprobs] == pytest.approx(expected, abs=1e-4)
    for one, row in zip(outcome.prompt_logprobs, exact, strict=True):
        best = row.topk(2)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("chunk", [1 << 30, 5])
def test_an_embedding_is_made_of_transformers_final_hidden_states(
    harness: Any, model: Any, prompt: Any, pooling: Pooling, chunk: int
) -> None:
    tokens = prompt(23)
    with torch.inference_mode():
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0].double()
    expected = hidden[-1] if pooling is Pooling.LAST else hidden.mean(0)
    (outcome,) = run(harness, embedded(tokens, pooling), chunk=chunk)
    assert np.frombuffer(outcome.embedding, "<f4") == pytest.approx(expected.numpy(), abs=1e-4)


def test_readers_share_a_step_with_those_who_generate_and_change_nothing_for_them(harness: Any, prompt: Any) -> None:
    generating = [harness.sequence(prompt(n, seed=n)) for n in (11, 4)]
    (alone,) = harness.step(generating[:1])
    harness.release(generating[0])
    generating[0].token_ids.pop()
    both = reading(prompt(13), SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0, logprobs=0))
    readers = [embedded(prompt(9), Pooling.MEAN), reading(prompt(13)), embedded(prompt(9), Pooling.LAST)]
    apart = [run(harness, reader)[0] for reader in readers]
    mixed = [readers[0], generating[0], readers[1], both, generating[1], readers[2]]
    outcomes = harness.step(mixed)
    assert outcomes[1] == alone
    for outcome, expected in zip((outcomes[0], outcomes[2], outcomes[5]), apart, strict=True):
        if expected.embedding is not None:
            assert np.frombuffer(outcome.embedding, "<f4") == vector(expected)
        else:
            assert [p.logprob for p in outcome.prompt_logprobs] == pytest.approx(
                [p.logprob for p in expected.prompt_logprobs], abs=1e-5
            )
    assert outcomes[3].logprob is not None
    assert len(outcomes[3].prompt_logprobs) == 12
    (second,) = harness.step([both])
    assert second.prompt_logprobs is None


def test_a_prompt_computed_again_from_its_start_is_read_once(harness: Any, prompt: Any) -> None:
    tokens = prompt(20)
    (whole,) = run(harness, reading(tokens))
    again, mean = reading(tokens), embedded(tokens, Pooling.MEAN)
    harness.step([again, mean], chunk=8)
    for sequence in (again, mean):
        harness.release(sequence)  # preempted
    outcomes = run(harness, again, mean, chunk=6)
    assert [p.logprob for p in outcomes[0].prompt_logprobs] == pytest.approx(
        [p.logprob for p in whole.prompt_logprobs], abs=1e-5
    )
    (expected,) = run(harness, embedded(tokens, Pooling.MEAN))
    assert np.frombuffer(outcomes[1].embedding, "<f4") == vector(expected)


def test_one_token_alone_has_no_logprobs_and_is_its_own_mean(harness: Any) -> None:
    scored, mean, last = run(harness, reading([5]), embedded([5], Pooling.MEAN), embedded([5], Pooling.LAST))
    assert scored.prompt_logprobs == ()
    assert np.frombuffer(mean.embedding, "<f4") == vector(last)


def test_weights_that_are_not_finite_fail_the_embedding(tiny_model: Any, bind: Any, prompt: Any) -> None:
    harness = bind(tiny_model("Llama"))
    harness.weights.tensors["model.norm.weight"].fill_(float("nan"))
    (outcome,) = run(harness, embedded(prompt(5), Pooling.LAST))
    assert outcome.error.code == "not_a_number"
    assert outcome.embedding is None

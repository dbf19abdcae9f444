"""One row as a distribution, against brute force over a small vocabulary."""

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearline.engine.distribution import Row, _mix, adjust, draw, logprob, uniform
from nearline.protocol import SamplingParams
from nearline.protocol.errors import InvalidRequest

LOGITS = np.asarray([2.0, 1.0, 0.5, 0.5, -0.3, -1.0, -2.0, 3.1], dtype=np.float32)
NUM_DRAWS = 6_000


def brute_force(logits: Row, params: SamplingParams) -> list[float]:
    """Temperature, then min_p, top_k, top_p, each renormalising, in plain Python floats."""
    scaled = [float(x) / params.temperature for x in logits]
    best = max(scaled)
    weights = [math.exp(x - best) for x in scaled]
    weights = [w if w >= params.min_p else 0.0 for w in weights]
    if params.top_k:
        least = sorted(weights, reverse=True)[min(params.top_k, len(weights)) - 1]
        weights = [w if w >= least else 0.0 for w in weights]
    kept: set[int] = set()
    mass, total = 0.0, sum(weights)
    for token in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        if kept and mass >= params.top_p * total:
            break
        kept.add(token)
        mass += weights[token]
    total = sum(weights[token] for token in kept)
    return [w / total if i in kept else 0.0 for i, w in enumerate(weights)]


def chi_square_limit(degrees: int) -> float:
    """Value that chi-square exceeds once in a million (Wilson-Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1},
     {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8}],
)  # fmt: skip
def test_draws_over_many_seeds_follow_the_distribution(filters: dict[str, Any]) -> None:
    counts = Counter(draw(LOGITS, SamplingParams(seed=seed, **filters), position=17) for seed in range(NUM_DRAWS))
    expected = brute_force(LOGITS, SamplingParams(**filters))
    assert set(counts) <= {token for token, p in enumerate(expected) if p > 0}
    chi_square = sum((counts[i] - p * NUM_DRAWS) ** 2 / (p * NUM_DRAWS) for i, p in enumerate(expected) if p > 0)
    assert chi_square < chi_square_limit(sum(p > 0 for p in expected) - 1)


def test_draws_over_many_positions_of_one_seed_follow_the_distribution_and_are_not_correlated() -> None:
    draws = [draw(LOGITS, SamplingParams(seed=7), position) for position in range(NUM_DRAWS)]
    expected = brute_force(LOGITS, SamplingParams())
    pairs = Counter(zip(draws[::2], draws[1::2], strict=True))
    chi_square = 0.0
    for a, p in enumerate(expected):
        for b, q in enumerate(expected):
            mean = p * q * NUM_DRAWS / 2
            chi_square += (pairs[a, b] - mean) ** 2 / mean
    assert chi_square < chi_square_limit(len(expected) ** 2 - 1)


@given(
    st.lists(st.integers(-500, 500), min_size=1, max_size=40),
    st.integers(0, 45), st.floats(0.01, 1.0), st.floats(0.0, 0.9), st.floats(0.1, 3.0), st.integers(),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_a_draw_is_always_a_token_that_survives_the_filters(
    values: list[int], top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    logits = np.asarray(values, dtype=np.float32) / 64  # equal, or apart in float32 too
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, seed=seed)
    token = draw(logits, params, position=3)
    # A token at the very edge of a filter may fall either way in float32.
    assert brute_force(logits, params)[token] > 0 or _is_at_an_edge(logits, token, params)


def _is_at_an_edge(logits: Row, token: int, params: SamplingParams) -> bool:
    """Whether the token survives filters that are one part in 10⁵ more generous."""
    more = 1e-5
    generous = SamplingParams(
        top_k=params.top_k and params.top_k + int(np.sum(np.isclose(logits, logits[token], atol=1e-5))),
        top_p=min(1.0, params.top_p * (1 + more) + more), min_p=params.min_p * (1 - more),
        temperature=params.temperature,
    )  # fmt: skip
    return brute_force(logits, generous)[token] > 0


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.02}, {}])
def test_a_large_vocabulary_takes_the_same_tokens_as_brute_force(filters: dict[str, Any]) -> None:
    logits = np.random.default_rng(0).normal(0, 3, 20_011).astype(np.float32)
    allowed = {i for i, p in enumerate(brute_force(logits, SamplingParams(**filters))) if p > 0}
    drawn = {draw(logits, SamplingParams(seed=seed, **filters), position=0) for seed in range(500)}
    assert drawn <= allowed
    assert len(drawn) > min(len(allowed), 100) / 4


def test_the_uniform_of_a_seed_and_position_is_splitmix64_and_never_changes() -> None:
    """Changing it would change the text of every seed."""
    # The first outputs of SplitMix64 seeded with 1234567, as its reference implementation prints them.
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [_mix(1234567 + step * 0x9E3779B97F4A7C15) for step in range(3)] == reference
    found = [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(-1, 2**40)]
    assert found == [0.6524484863740322, 0.7012121095215252, 0.36818951565166946, 0.5440041384053076]
    many = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert 0.49 < sum(many) / len(many) < 0.51
    assert len(set(many)) == len(many)
    assert all(0 <= u < 1 for u in many)


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(5000, -np.inf, dtype=np.float32)
    logits[[17, 4999]] = 0.0
    drawn = {draw(logits, SamplingParams(seed=seed, top_p=0.99), position=1) for seed in range(200)}
    drawn |= {draw(logits, SamplingParams(seed=seed), position=1) for seed in range(200)}
    assert drawn == {17, 4999}


def test_penalties_by_hand() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    logits = np.asarray([4.0, -4.0, 1.0, 3.0, -1.0], dtype=np.float32)
    adjust(logits, params, prompt=[0, 1], generated=[2, 2, 4], ends=[])
    # 0 and 1 are in the prompt: only repetition. 2 twice, 4 once in the output: all three. 3 nowhere.
    assert logits.tolist() == [2.0, -8.0, 0.5 - 0.5 - 0.5, 3.0, -2.0 - 0.25 - 0.5]


def test_repetition_penalty_equals_transformers() -> None:
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = np.random.default_rng(1).normal(0, 4, 50).astype(np.float32)
    tokens = [random.Random(2).randrange(50) for _ in range(30)]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), torch.from_numpy(logits.copy())[None])[0]
    adjust(logits, SamplingParams(repetition_penalty=1.3), tokens[:20], tokens[20:], [])
    np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-6)


def test_bias_and_min_tokens() -> None:
    params = SamplingParams(logit_bias=((1, 5.0), (3, -100.0)), min_tokens=2, stop_token_ids=(0,))
    logits = np.zeros(5, dtype=np.float32)
    adjust(logits, params, prompt=[4], generated=[4], ends=[0, 2, 9999])
    assert logits.tolist() == [-np.inf, 5.0, -np.inf, -100.0, 0.0]
    logits = np.zeros(5, dtype=np.float32)
    adjust(logits, params, prompt=[4], generated=[4, 4], ends=[0, 2])
    assert logits.tolist() == [0.0, 5.0, 0.0, -100.0, 0.0]


def test_a_bias_outside_the_vocabulary_is_the_requests_own_error() -> None:
    with pytest.raises(InvalidRequest, match="token 5; the vocabulary has 5"):
        adjust(np.zeros(5, dtype=np.float32), SamplingParams(logit_bias=((5, 1.0),)), [], [], [])


def test_logprobs_are_the_models_own_log_softmax() -> None:
    exact = LOGITS.astype(np.float64) - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    found = logprob(LOGITS, 4, 3)
    assert found.logprob == pytest.approx(exact[4], abs=1e-6)
    assert [token for token, _ in found.top] == [7, 0, 1]
    assert [value for _, value in found.top] == pytest.approx([exact[7], exact[0], exact[1]], abs=1e-6)
    assert logprob(LOGITS, 4, 0).top == ()
    assert [token for token, _ in logprob(LOGITS, 0, 4).top] == [7, 0, 1, 2]  # equal ones: the lower id
    assert len(logprob(LOGITS, 0, 99).top) == len(LOGITS)

"""The law of step times against its definition, by brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearline.protocol import StepTimeModel, StepWork, from_plain, to_plain

MODEL = StepTimeModel(
    prefill_base_s=0.01, prefill_per_token_s=1e-4, prefill_per_square_s=1e-8,
    decode_base_s=0.008, decode_per_context_s=1e-6, decode_per_sequence_s=5e-4,
)  # fmt: skip


def test_a_whole_prompt_costs_base_tokens_and_squares() -> None:
    assert MODEL.prefill_s(1000) == pytest.approx(0.01 + 0.1 + 0.01)
    assert MODEL.decode_s(4, 2000) == pytest.approx(0.008 + 0.002 + 0.002)


def test_chunks_of_a_prompt_cost_its_tokens_and_squares_once_and_a_base_each() -> None:
    chunks = [(0, 300), (300, 500), (800, 200)]
    parts = sum(MODEL.prefill_s(n, start) for start, n in chunks)
    assert parts == pytest.approx(MODEL.prefill_s(1000) + 2 * MODEL.prefill_base_s)


def test_decodes_ride_along_with_a_prefill_without_their_base() -> None:
    work = StepWork().and_prefill(100).and_decode(1000).and_decode(1000)
    assert MODEL.step_s(work) == pytest.approx(MODEL.prefill_s(100) + 2000e-6 + 2 * 5e-4)


@given(
    per_token=st.sampled_from([0.0, 1e-5, 1e-3]), per_square=st.sampled_from([0.0, 1e-9, 1e-6]),
    seconds=st.floats(0, 1), start=st.integers(0, 3000), limit=st.integers(0, 600),
)  # fmt: skip
def test_the_largest_chunk_is_found(
    per_token: float, per_square: float, seconds: float, start: int, limit: int
) -> None:
    model = StepTimeModel(
        prefill_base_s=0.0, prefill_per_token_s=per_token, prefill_per_square_s=per_square,
        decode_base_s=0.0, decode_per_context_s=0.0, decode_per_sequence_s=0.0,
    )  # fmt: skip
    found = model.tokens_within(seconds, start, limit)
    assert 0 <= found <= limit
    slack = 1 + 1e-9
    assert found == 0 or model.prefill_s(found, start) <= seconds * slack
    assert found == limit or seconds == 0 or model.prefill_s(found + 1, start) * slack >= seconds


def test_a_guess_is_slow_and_grows_with_the_bytes() -> None:
    small, large = StepTimeModel.guess(270_000_000), StepTimeModel.guess(14_000_000_000)
    assert 0.02 < small.decode_s(1, 100) < 0.05
    assert large.prefill_s(512) > 10
    assert from_plain(StepTimeModel, to_plain(small)) == small

"""Which recorded size a decoding step takes, and what its padding says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearline.engine.decode_shapes import DecodeShape, RecordingPlan, decode_numbers, shape_of
from nearline.engine.sequence import Sequence
from nearline.engine.types import BatchItem
from nearline.protocol import Digest, ModelId, Pooling, Request, RequestId, SamplingParams
from nearline.protocol.errors import InvalidRequest

BLOCK = 4


def decoding(length: int, first_block: int = 1, **wishes: object) -> BatchItem:
    """A sequence of `length` tokens whose last one is to be computed."""
    request = Request(RequestId("r"), ModelId("m"), (7,), SamplingParams(), **wishes)  # type: ignore[arg-type]
    table = list(range(first_block, first_block - (-length // BLOCK)))
    sequence = Sequence(request, 1, list(range(10, 10 + length)), arrived_at=0.0, block_table=table)
    return BatchItem(sequence, length - 1, 1, True)


@given(count=st.integers(1, 128), length=st.integers(1, 3000))
def test_a_size_holds_its_step_and_wastes_at_most_half_or_seven_rows(count: int, length: int) -> None:
    shape = shape_of([decoding(length)] * count, BLOCK)
    assert shape is not None
    blocks = -(-length // BLOCK)
    assert count <= shape.num_sequences <= max(2 * count - 1, count + 7)
    assert blocks <= shape.num_blocks <= max(32, 2 * blocks - 1)


def test_few_sizes_serve_all_steps() -> None:
    assert len({shape_of([decoding(9)] * count, BLOCK) for count in range(1, 129)}) == 4 + 15


def test_only_plain_decoding_is_replayed() -> None:
    plain = decoding(5)
    assert shape_of([plain], BLOCK) == DecodeShape(1, 32)
    assert shape_of([], BLOCK) is None
    assert shape_of([plain] * 129, BLOCK) is None
    prefill = BatchItem(plain.sequence, 2, 3, True)
    unsampled = BatchItem(plain.sequence, 4, 1, False)
    adapted = decoding(5, adapter_digest=Digest("a"))
    embedding = decoding(5, pooling=Pooling.LAST)
    for other in (prefill, unsampled, adapted, embedding):
        assert shape_of([plain, other], BLOCK) is None


def test_the_numbers_of_a_step_and_its_padding() -> None:
    items, shape = [decoding(6, first_block=3), decoding(4, first_block=8)], DecodeShape(4, 3)
    numbers = iter(decode_numbers(items, shape, BLOCK, vocab_size=100))
    ids, positions, slots, starts, lens, tables = ([next(numbers) for _ in range(n)] for n in shape.parts)
    assert (ids, positions) == ([15, 13, 0, 0], [5, 3, 0, 0])
    assert slots == [4 * BLOCK + 1, 8 * BLOCK + 3, -1, -1]
    assert starts == [0, 1, 2, 3, 4]
    assert lens == [6, 4, 1, 1]
    assert tables == [3, 4, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0]
    assert next(numbers, None) is None


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="vocabulary of 12"):
        decode_numbers([decoding(6)], DecodeShape(1, 32), BLOCK, vocab_size=12)


def test_a_size_is_recorded_once_it_has_come_often() -> None:
    plan, shape = RecordingPlan(max_bytes=100, after_steps=2, max_recorded=3), DecodeShape(1, 32)
    assert [plan.is_due(shape, 10) for _ in range(4)] == [False, False, True, True]
    assert not plan.is_due(DecodeShape(2, 32), 10)


def test_neither_more_sizes_nor_more_bytes_than_allowed_are_recorded() -> None:
    plan, shape = RecordingPlan(max_bytes=100, after_steps=0, max_recorded=3), DecodeShape(1, 32)
    assert not plan.is_due(shape, 101)
    plan.recorded(60)
    assert plan.is_due(shape, 40)
    assert not plan.is_due(shape, 41)
    plan.recorded(20)
    assert plan.is_due(shape, 20)
    plan.recorded(0)
    assert not plan.is_due(shape, 1)


def test_a_recorded_size_keeps_its_numbers_and_logits() -> None:
    assert DecodeShape(4, 3).kept_bytes(vocab_size=100) == 4 * (4 * 3 + 5 + 4 + 4 * 3 + 4 * 100)

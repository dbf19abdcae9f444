"""Packing of a step, by hand on small numbers."""

import pytest
import torch

from nearline.engine.batch_tensors import adapter_order, adapter_runs, step_tensors
from nearline.engine.models.lora import AdapterRun
from nearline.engine.sequence import Sequence
from nearline.engine.types import BatchItem
from nearline.protocol import Digest, ModelId, Request, RequestId
from nearline.protocol.errors import InvalidRequest

CPU = torch.device("cpu")


def item(tokens: list[int], start: int, count: int, blocks: list[int], adapter: str | None = None) -> BatchItem:
    digest = None if adapter is None else Digest(adapter)
    request = Request(RequestId("r"), ModelId("m"), tuple(tokens), adapter_digest=digest)
    sequence = Sequence(request, 1, tokens, arrived_at=0.0, block_table=blocks)
    return BatchItem(sequence, start, count, is_sampled=start + count == len(tokens))


def test_prefills_and_decodes_are_packed_in_order() -> None:
    items = [
        item([10, 11, 12, 13, 14, 15], 1, 4, [7, 2]),  # a chunk in the middle of a prompt
        item([20, 21, 22, 23, 24], 4, 1, [5, 9]),  # a decode
        item([30, 31], 0, 2, [3, 8, 1]),  # a whole prompt, with a block in reserve
    ]
    step = step_tensors(items, 4, 100, CPU)
    assert step.token_ids_T.tolist() == [11, 12, 13, 14, 24, 30, 31]
    assert step.positions_T.tolist() == [1, 2, 3, 4, 4, 0, 1]
    assert step.slots_T.tolist() == [29, 30, 31, 8, 36, 12, 13]
    assert step.sampled_S.tolist() == [4, 6]
    assert step.meta.query_starts_B1.tolist() == [0, 4, 5, 7]
    assert step.meta.context_lens_B.tolist() == [5, 5, 2]
    assert step.meta.block_tables_BN.tolist() == [[7, 2], [5, 9], [3, 0]]
    assert (step.meta.max_query_len, step.max_context_len, step.num_tokens) == (4, 5, 7)


def test_everything_is_int32_and_contiguous() -> None:
    step = step_tensors([item([1, 2, 3], 0, 3, [0])], 4, 100, CPU)
    tensors = (step.token_ids_T, step.positions_T, step.slots_T, step.meta.block_tables_BN, step.meta.query_starts_B1)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in tensors)


@pytest.mark.parametrize("token", [-1, 100])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary of 100"):
        step_tensors([item([1, token], 0, 2, [0])], 4, 100, CPU)


def test_rows_of_one_adapter_become_neighbours_and_the_base_comes_first() -> None:
    names = ["b", None, "a", "b", None, "a"]
    items = [item([1, 2, 3], 0, 2, [0], name) for name in names]
    order = adapter_order(items)
    assert order == [1, 4, 2, 5, 0, 3]
    assert adapter_runs([items[i] for i in order]) == (AdapterRun(Digest("a"), 4, 8), AdapterRun(Digest("b"), 8, 12))
    assert adapter_runs(items[1:2]) == ()

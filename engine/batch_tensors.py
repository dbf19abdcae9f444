"""Turns the items of a step into the packed tensors the decoder reads: numpy first, then one conversion."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from nearline.engine.models.lora import AdapterRun
from nearline.engine.types import BatchItem
from nearline.kernels import AttentionMeta
from nearline.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step, packed. Shapes: token_ids_T, positions_T, slots_T [T]; sampled_S lists the rows that are sampled."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    sampled_S: Tensor
    meta: AttentionMeta
    max_context_len: int

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]


def adapter_order(items: Seq[BatchItem]) -> list[int]:
    """Order items so that those of one adapter are neighbours, the base's first; otherwise as they came."""
    return sorted(range(len(items)), key=lambda i: items[i].sequence.request.adapter_digest or "")


def adapter_runs(items: Seq[BatchItem]) -> tuple[AdapterRun, ...]:
    """List the row ranges of each adapter, for items in adapter order."""
    runs: list[AdapterRun] = []
    row = 0
    for item in items:
        digest, end = item.sequence.request.adapter_digest, row + item.num_tokens
        if digest is not None:
            if runs and runs[-1].digest == digest:
                runs[-1] = AdapterRun(digest, runs[-1].start, end)
            else:
                runs.append(AdapterRun(digest, row, end))
        row = end
    return tuple(runs)


def step_tensors(items: Seq[BatchItem], block_size: int, vocab_size: int, device: torch.device) -> StepTensors:
    """Pack the items in the order given. Raises InvalidRequest if a token id is outside the vocabulary."""
    contexts = [item.start + item.num_tokens for item in items]
    tables = _tables(items, contexts, block_size)
    tokens = _tokens(items, tables, block_size)
    if min(tokens.ids) < 0 or max(tokens.ids) >= vocab_size:
        raise InvalidRequest(f"a token id lies outside the vocabulary of {vocab_size}")
    starts = [0, *accumulate(item.num_tokens for item in items)]
    sampled = [end - 1 for end, item in zip(starts[1:], items, strict=True) if item.is_sampled]
    parts = [tokens.ids, tokens.positions, tokens.slots, sampled, starts, contexts, list(chain.from_iterable(tables))]
    # One array, one copy to the device; the pieces are views of it.
    packed = torch.from_numpy(np.asarray(list(chain.from_iterable(parts)), dtype=np.int32)).to(device)
    ids, positions, slots, rows, starts_B1, lens_B, blocks = torch.split(packed, [len(part) for part in parts])
    longest_query = max(item.num_tokens for item in items)
    meta = AttentionMeta(starts_B1, lens_B, blocks.view(len(items), len(tables[0])), longest_query)
    return StepTensors(ids, positions, slots, rows, meta, max(contexts))


@dataclass(frozen=True, slots=True)
class _Tokens:
    ids: list[int]
    positions: list[int]
    slots: list[int]


def _tables(items: Seq[BatchItem], contexts: Seq[int], block_size: int) -> list[list[int]]:
    """The blocks in use of each item, padded to the longest."""
    counts = [-(-context // block_size) for context in contexts]
    width = max(counts)
    return [
        item.sequence.block_table[:count] + [0] * (width - count) for item, count in zip(items, counts, strict=True)
    ]


def _tokens(items: Seq[BatchItem], tables: Seq[list[int]], block_size: int) -> _Tokens:
    """Plain Python: for the few tokens of a decode it is quicker than a dozen calls into numpy."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for item, table in zip(items, tables, strict=True):
        span = range(item.start, item.start + item.num_tokens)
        ids += item.sequence.token_ids[span.start : span.stop]
        positions += span
        slots += [table[position // block_size] * block_size + position % block_size for position in span]
    return _Tokens(ids, positions, slots)

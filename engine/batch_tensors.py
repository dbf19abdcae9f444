"""Turns the items of a step into the packed tensors the decoder reads: numpy first, then one conversion."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

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
    counts = [item.num_tokens for item in items]
    num_tokens, num_items = sum(counts), len(items)
    contexts = [item.start + item.num_tokens for item in items]
    tables = [item.sequence.block_table for item in items]
    width = max(-(-context // block_size) for context in contexts)
    sampled = [i for i, item in enumerate(items) if item.is_sampled]
    bounds = np.cumsum([0, *([num_tokens] * 3), num_items + 1, num_items, len(sampled), num_items * width])
    packed = np.zeros(bounds[-1], dtype=np.int32)
    ids, positions, slots, starts, lens, rows, blocks = (packed[begin:end] for begin, end in pairwise(bounds))
    starts[1:] = np.cumsum(counts)
    lens[:] = contexts
    rows[:] = starts[1:][sampled] - 1
    grid = blocks.reshape(num_items, width)
    for row, (table, context) in enumerate(zip(tables, contexts, strict=True)):
        used = -(-context // block_size)
        grid[row, :used] = table[:used]
    if num_tokens == num_items:
        ids[:] = [item.sequence.token_ids[item.start] for item in items]
        positions[:] = [item.start for item in items]
        owners = np.arange(num_items)
    else:
        ids[:] = [
            token for item in items for token in item.sequence.token_ids[item.start : item.start + item.num_tokens]
        ]
        owners = np.repeat(np.arange(num_items), counts)
        offsets = np.asarray([item.start for item in items]) - starts[:-1]
        positions[:] = np.arange(num_tokens) + offsets[owners]
    slots[:] = grid[owners, positions // block_size] * block_size + positions % block_size
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise InvalidRequest(f"a token id lies outside the vocabulary of {vocab_size}")
    return _on_device(packed, [int(bound) for bound in bounds], grid.shape, max(counts), device)


def _on_device(
    packed: np.ndarray, bounds: list[int], grid: tuple[int, ...], max_query_len: int, device: torch.device
) -> StepTensors:
    whole = torch.from_numpy(packed).to(device)
    ids, positions, slots, starts, lens, rows, blocks = (whole[begin:end] for begin, end in pairwise(bounds))
    meta = AttentionMeta(starts, lens, blocks.view(grid), max_query_len)
    longest = int(packed[bounds[4] : bounds[5]].max())
    return StepTensors(ids, positions, slots, rows, meta, longest)

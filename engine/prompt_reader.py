"""What requests want to know of their prompts: the log-probability of every token, or one vector for the whole.

A prompt may come in several chunks; what was read of one waits here for the rest, keyed by where it starts, so that
a chunk that is computed again (after a preemption, or alone after a failed step) replaces what it gave before.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nearline.engine.sequence import Sequence
from nearline.engine.types import BatchItem, SampledToken
from nearline.protocol import Pooling, TokenLogprob
from nearline.protocol.errors import ErrorInfo, NotANumber

_SLAB_ROWS = 64
"""Rows whose logits exist at once: 64 of a vocabulary of 150,000 take 38 MB."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What was read of positions from `start` on: `sum_M` in fp64 for a mean, log-probabilities for scoring."""

    start: int
    sum_M: Tensor | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptReader:
    """Reads the hidden states of prompts. `logits` projects rows of a sequence: [B, M] → [B, V] in fp32."""

    def __init__(self, logits: Callable[[Tensor, Sequence], Tensor]) -> None:
        self._logits = logits
        self._chunks: WeakKeyDictionary[Sequence, list[_Chunk]] = WeakKeyDictionary()

    def read(self, hidden_TM: Tensor, items: Seq[BatchItem]) -> None:
        """Take in one step. Shapes: [T, M], the rows of the items one after another."""
        row = 0
        for item in items:
            if item.sequence.reads_prompt:
                rows = hidden_TM[row : row + item.num_tokens]
                known = [chunk for chunk in self._chunks.get(item.sequence, []) if chunk.start < item.start]
                self._chunks[item.sequence] = [*known, self._chunk(rows, item)]
            row += item.num_tokens

    def outcome(self, last_M: Tensor, item: BatchItem) -> SampledToken:
        """Answer a sequence that needs no token, when its last prompt position has been read. Shapes: [M]."""
        pooling = item.sequence.request.pooling
        if pooling is None:
            return self.add_logprobs(SampledToken(0), item)
        vector = last_M.float()
        if pooling is Pooling.MEAN:
            sums = [chunk.sum_M for chunk in self._chunks.pop(item.sequence, []) if chunk.sum_M is not None]
            vector = (torch.stack(sums).sum(0) / item.sequence.num_prompt).float()
        if not bool(torch.isfinite(vector).all()):
            broken = NotANumber(
                "the embedding of this text is not finite: the model overflows or holds weights that are not numbers; "
                "another text, or a checkpoint of another dtype, may do"
            )
            return SampledToken(0, error=ErrorInfo.of(broken))
        return SampledToken(0, embedding=vector.cpu().numpy().astype("<f4").tobytes())

    def add_logprobs(self, outcome: SampledToken, item: BatchItem) -> SampledToken:
        """Put the prompt's log-probabilities beside the first token of a sequence that asked for them."""
        if not item.sequence.reads_prompt or outcome.error is not None:
            return outcome
        chunks = self._chunks.pop(item.sequence, [])
        return replace(outcome, prompt_logprobs=tuple(one for chunk in chunks for one in chunk.logprobs))

    def _chunk(self, rows_TM: Tensor, item: BatchItem) -> _Chunk:
        sequence = item.sequence
        if sequence.request.pooling is not None:
            return _Chunk(item.start, sum_M=rows_TM.double().sum(0))
        num_top = sequence.request.sampling.prompt_logprobs or 0
        end = min(item.start + item.num_tokens, sequence.num_prompt - 1)  # the last row chooses the first new token
        found: list[TokenLogprob] = []
        for start in range(item.start, end, _SLAB_ROWS):
            stop = min(start + _SLAB_ROWS, end)
            targets = sequence.token_ids[start + 1 : stop + 1]
            logits_BV = self._logits(rows_TM[start - item.start : stop - item.start], sequence)
            found += _logprobs(logits_BV, targets, num_top)
        return _Chunk(item.start, logprobs=tuple(found))


def _logprobs(logits_BV: Tensor, targets: Seq[int], num_top: int) -> list[TokenLogprob]:
    """The model's own log-probabilities of `targets`, one per row, and each row's best alternatives."""
    totals_B1 = logits_BV.logsumexp(-1, keepdim=True)
    index_B1 = torch.tensor(targets, device=logits_BV.device).unsqueeze(1)
    chosen = (logits_BV.gather(1, index_B1) - totals_B1).squeeze(1).tolist()
    if not num_top:
        return [TokenLogprob(value) for value in chosen]
    best = logits_BV.topk(min(num_top, logits_BV.shape[1]))
    tops = zip(best.indices.tolist(), (best.values - totals_B1).tolist(), strict=True)
    return [TokenLogprob(value, tuple(zip(*top, strict=True))) for value, top in zip(chosen, tops, strict=True)]

"""Chooses the next token of every sampled row: all greedy rows at once, the others one by one.

Holds no state: penalties, grammars and limits derive from the sequence's tokens, randomness from (seed, position).
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from nearline import kernels
from nearline.engine.distribution import Row, adjust, adjusts, draw, is_greedy, logprob
from nearline.engine.grammars import Grammars
from nearline.engine.types import BatchItem, SampledToken
from nearline.protocol import SamplingParams
from nearline.protocol.errors import CheckpointCorrupt, ErrorInfo, NearlineError


class Sampler:
    """Samples for one model. `eos_token_ids` are what `min_tokens` holds back (besides a request's own stop ids)."""

    def __init__(self, eos_token_ids: Seq[int], grammars: Grammars) -> None:
        self._eos = tuple(eos_token_ids)
        self._grammars = grammars

    def sample(self, logits_SV: Tensor, items: Seq[BatchItem]) -> list[SampledToken]:
        """Choose a token per row; `items[i]` belongs to row i. A row that cannot be sampled carries its error.

        Shapes: [S, V] fp32.
        """
        best, is_finite = _best(logits_SV)
        rows: np.ndarray | None = None
        outcomes = []
        for index, item in enumerate(items):
            if not is_finite[index]:
                outcomes.append(_failed(_not_finite(item)))
            elif _is_plain_greedy(item):
                outcomes.append(SampledToken(best[index]))
            else:
                rows = logits_SV.cpu().numpy() if rows is None else rows
                outcomes.append(self._choose(rows[index], item))
        return outcomes

    def _choose(self, raw: Row, item: BatchItem) -> SampledToken:
        sequence, params = item.sequence, item.sequence.request.sampling
        position = item.start + item.num_tokens
        num_prompt = sequence.num_prompt
        logits = raw
        try:
            if adjusts(params, position - num_prompt) or params.grammar is not None:
                logits = raw.copy()
                generated = sequence.token_ids[num_prompt:position]
                adjust(logits, params, sequence.request.prompt_token_ids, generated, self._ends(params))
                if params.grammar is not None:
                    logits[~self._grammars.allowed(sequence, position)] = -np.inf
                if not np.isfinite(logits.max()):
                    return _failed(_not_finite(item))
            token_id = int(logits.argmax()) if is_greedy(params) else draw(logits, params, position)
            is_last = params.grammar is not None and self._grammars.completes(sequence, token_id)
        except NearlineError as error:
            return _failed(error)
        reported = None if params.logprobs is None else logprob(raw, token_id, params.logprobs)
        return SampledToken(token_id, reported, is_last=is_last)

    def _ends(self, params: SamplingParams) -> Seq[int]:
        """Tokens that `min_tokens` holds back. None with a grammar: it alone knows where it may end."""
        if params.grammar is not None:
            return ()
        return params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self._eos)


def _best(logits_SV: Tensor) -> tuple[list[int], list[bool]]:
    """Return each row's best token and whether its logit is finite: NaN wins every maximum, all -inf has none."""
    best: list[int]
    is_finite: list[bool]
    if logits_SV.device.type == "cpu":
        rows = logits_SV.numpy()  # numpy's argmax takes a quarter of the time of torch's
        winners = rows.argmax(axis=1)
        best, is_finite = winners.tolist(), np.isfinite(rows[np.arange(len(rows)), winners]).tolist()
        return best, is_finite
    best, is_finite = kernels.argmax(logits_SV).tolist(), torch.isfinite(logits_SV.amax(dim=-1)).tolist()
    return best, is_finite


def _is_plain_greedy(item: BatchItem) -> bool:
    params = item.sequence.request.sampling
    num_generated = item.start + item.num_tokens - item.sequence.num_prompt
    is_free = params.logprobs is None and params.grammar is None
    return is_greedy(params) and is_free and not adjusts(params, num_generated)


def _not_finite(item: BatchItem) -> NearlineError:
    position = item.start + item.num_tokens
    whose = "adapter" if item.sequence.request.adapter_digest else "checkpoint"
    return CheckpointCorrupt(f"no finite logits for position {position}; verify the {whose}'s weights")


def _failed(error: NearlineError) -> SampledToken:
    return SampledToken(token_id=0, error=ErrorInfo.of(error))

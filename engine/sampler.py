"""Chooses the next token of every sampled row: all greedy rows at once, the others one by one; on a device whatever
needs no history at once too.

Holds no state: penalties, grammars and limits derive from the sequence's tokens, randomness from (seed, position).
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from nearline import kernels
from nearline.engine.distribution import Row, adjust, adjusts, draw, is_greedy, logprob, wishes_of
from nearline.engine.grammars import Grammars
from nearline.engine.types import BatchItem, SampledToken
from nearline.protocol import SamplingParams
from nearline.protocol.errors import ErrorInfo, InvalidRequest, NearlineError, NotANumber


class Sampler:
    """Samples for one model. `eos_token_ids` are what `min_tokens` holds back (besides a request's own stop ids)."""

    def __init__(self, eos_token_ids: Seq[int], grammars: Grammars) -> None:
        self._eos = tuple(eos_token_ids)
        self._grammars = grammars

    def sample(self, logits_SV: Tensor, items: Seq[BatchItem]) -> list[SampledToken]:
        """Choose a token per row; `items[i]` belongs to row i. A row that cannot be sampled carries its error.

        Shapes: [S, V] fp32.
        """
        choose = _chosen_here if logits_SV.device.type == "cpu" else _chosen_on_device
        chosen = choose(logits_SV, items)
        others = [index for index, token in enumerate(chosen) if token is None]
        rows = dict(zip(others, _on_host(logits_SV, others), strict=True))
        return [
            self._choose(rows[index], item)
            if token is None
            else SampledToken(token)
            if token >= 0
            else _failed(_not_finite(item))
            for index, (token, item) in enumerate(zip(chosen, items, strict=True))
        ]

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
                    return _failed(_nothing_allowed(position) if np.isfinite(raw.max()) else _not_finite(item))
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


def _chosen_here(logits_SV: Tensor, items: Seq[BatchItem]) -> list[int | None]:
    """Return the best token of greedy rows, -1 for rows without a finite best, None for rows that want more.

    NaN wins every maximum, and a row of -inf has none that is finite.
    """
    rows = logits_SV.numpy()  # numpy's argmax takes a quarter of the time of torch's
    winners = rows.argmax(axis=1)
    best, is_finite = winners.tolist(), np.isfinite(rows[np.arange(len(rows)), winners]).tolist()
    return [
        -1 if not finite else token if is_greedy(item.sequence.request.sampling) and _is_plain(item) else None
        for token, finite, item in zip(best, is_finite, items, strict=True)
    ]


def _chosen_on_device(logits_SV: Tensor, items: Seq[BatchItem]) -> list[int | None]:
    """Return the token of every row that needs the logits and its parameters alone, else as `_chosen_here`.

    One launch and one copy of S tokens: rows of a vocabulary would take longer to copy than the step to run.
    """
    is_plain = [_is_plain(item) for item in items]
    wishes = [wishes_of(item.sequence.request.sampling, item.start + item.num_tokens) for item in items]
    wishes_5S = torch.tensor(wishes, dtype=torch.float64).T.contiguous().to(logits_SV.device)
    tokens = kernels.sample(logits_SV, wishes_5S).tolist()
    return [token if plain or token < 0 else None for token, plain in zip(tokens, is_plain, strict=True)]


def _on_host(logits_SV: Tensor, rows: list[int]) -> list[Row]:
    if not rows:
        return []
    if logits_SV.device.type == "cpu":
        values = logits_SV.numpy()
        return [values[row] for row in rows]
    return list(logits_SV[rows].cpu().numpy())


def _is_plain(item: BatchItem) -> bool:
    """Say whether a row needs its logits and the request's parameters alone: no history, mask or report."""
    params = item.sequence.request.sampling
    num_generated = item.start + item.num_tokens - item.sequence.num_prompt
    return params.logprobs is None and params.grammar is None and not adjusts(params, num_generated)


def _not_finite(item: BatchItem) -> NearlineError:
    position = item.start + item.num_tokens
    return NotANumber(
        f"the model's output for position {position} is not finite: "
        f"{'the adapter or its base' if item.sequence.request.adapter_digest else 'the model'} overflows "
        "or holds weights that are not numbers; another prompt, or a checkpoint of another dtype, may do"
    )


def _nothing_allowed(position: int) -> NearlineError:
    return InvalidRequest(f"the request's grammar and limits leave no token for position {position}; loosen them")


def _failed(error: NearlineError) -> SampledToken:
    return SampledToken(token_id=0, error=ErrorInfo.of(error))

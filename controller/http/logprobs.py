"""Log-probabilities in the two shapes OpenAI gives them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearline.controller.text.models import TextModel
from nearline.controller.text.stream import TokenText
from nearline.protocol import TokenLogprob

LOWEST = -9999.0
"""JSON has no infinity."""


def chat_logprobs(text: TextModel, tokens: Sequence[TokenText]) -> dict[str, Any]:
    """Shape them for chat: one entry per token, with its bytes."""
    content = []
    for token in tokens:
        top = [_entry(text, token_id, logprob) for token_id, logprob in token.logprob.top]
        content.append({**_entry(text, token.token_id, token.logprob.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is part of the answer: its text and, with log-probabilities, its tokens."""

    text: str = ""
    token_ids: Sequence[int] = ()


def completion_logprobs(text: TextModel, tokens: Sequence[TokenText], offset: int = 0) -> dict[str, Any]:
    """Shape them for completions: four parallel lists. `offset` is the length of an echoed prompt."""
    return {
        "tokens": [_text(text, token.token_id) for token in tokens],
        "token_logprobs": [_finite(token.logprob.logprob) for token in tokens],
        "top_logprobs": [_tops(text, token.logprob) for token in tokens],
        "text_offset": [offset + token.offset for token in tokens],
    }


def echo_logprobs(text: TextModel, echo: Echo, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Shape those of an echoed prompt likewise. Nothing comes before its first token, so that one has none."""
    detokenizer, num_chars, offsets = text.vocabulary.detokenizer(), 0, []
    for token_id in echo.token_ids:
        offsets.append(num_chars)
        num_chars += len(detokenizer.push(token_id))
    return {
        "tokens": [_text(text, token_id) for token_id in echo.token_ids],
        "token_logprobs": [None, *[_finite(one.logprob) for one in logprobs]],
        "top_logprobs": [None, *[_tops(text, one) for one in logprobs]],
        "text_offset": offsets,
    }


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Put the lists of `second` behind those of `first`."""
    return {key: [*value, *second[key]] for key, value in first.items()}


def _tops(text: TextModel, logprob: TokenLogprob) -> dict[str, float]:
    """Key alternatives by their text; of those that look the same the likeliest stays."""
    tops: dict[str, float] = {}
    for token_id, value in logprob.top:
        tops.setdefault(_text(text, token_id), _finite(value))
    return tops


def _entry(text: TextModel, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": _text(text, token_id),
        "logprob": _finite(logprob),
        "bytes": list(text.vocabulary.token_bytes(token_id)),
    }


def _text(text: TextModel, token_id: int) -> str:
    return text.vocabulary.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST

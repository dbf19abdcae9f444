"""Log-probabilities in the two shapes OpenAI gives them."""

import math
from collections.abc import Sequence
from typing import Any

from nearline.controller.text import TextModel
from nearline.controller.text_stream import TokenText

LOWEST = -9999.0
"""JSON has no infinity."""


def chat_logprobs(text: TextModel, tokens: Sequence[TokenText]) -> dict[str, Any]:
    """Shape them for chat: one entry per token, with its bytes."""
    content = []
    for token in tokens:
        top = [_entry(text, token_id, logprob) for token_id, logprob in token.logprob.top]
        content.append({**_entry(text, token.token_id, token.logprob.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(text: TextModel, tokens: Sequence[TokenText], offset: int = 0) -> dict[str, Any]:
    """Shape them for completions: four parallel lists. `offset` is the length of an echoed prompt."""
    tops = [{_text(text, i): _finite(logprob) for i, logprob in token.logprob.top} for token in tokens]
    return {
        "tokens": [_text(text, token.token_id) for token in tokens],
        "token_logprobs": [_finite(token.logprob.logprob) for token in tokens],
        "top_logprobs": tops,
        "text_offset": [offset + token.offset for token in tokens],
    }


def _entry(text: TextModel, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": _text(text, token_id), "logprob": _finite(logprob), "bytes": list(text.token_bytes(token_id))}


def _text(text: TextModel, token_id: int) -> str:
    return text.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST

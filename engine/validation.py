"""Why a request cannot be run here, said before it costs anything. Pure."""

import math
from collections.abc import Sequence as Seq

from nearline.engine.config import EngineConfig
from nearline.protocol import CheckpointInfo, Request, SamplingParams
from nearline.protocol.errors import ContextLengthExceeded, InvalidRequest, NearlineError


def request_problem(
    request: Request, generated: Seq[int], checkpoint: CheckpointInfo, config: EngineConfig
) -> NearlineError | None:
    """Return the error that the request deserves, or None for one that can run to its end."""
    num_prompt, num_tokens = len(request.prompt_token_ids), len(request.prompt_token_ids) + len(generated)
    if num_prompt == 0:
        return InvalidRequest("the prompt is empty; send at least one token", param="prompt")
    largest, smallest = max(*request.prompt_token_ids, *generated, 0), min(*request.prompt_token_ids, *generated, 0)
    if smallest < 0 or largest >= checkpoint.vocab_size:
        wrong = smallest if smallest < 0 else largest
        return InvalidRequest(f"token id {wrong} is outside the vocabulary of {checkpoint.vocab_size}", param="prompt")
    if num_tokens > checkpoint.max_context_tokens:
        return ContextLengthExceeded(
            f"{num_tokens} tokens exceed the context of {checkpoint.max_context_tokens}; shorten the prompt",
            param="prompt",
        )
    if num_tokens > config.kv_tokens:
        return ContextLengthExceeded(
            f"{num_tokens} tokens do not fit in this instance's KV cache of {config.kv_tokens}; "
            "shorten the prompt or give instances more memory (`--kv-bytes`)",
            param="prompt",
        )
    if request.pooling is not None and (request.sampling.max_tokens or request.sampling.prompt_logprobs is not None):
        return InvalidRequest("an embedding generates nothing: max_tokens is 0, without prompt_logprobs", param="input")
    return _sampling_problem(request.sampling, checkpoint.vocab_size, is_read_only=request.pooling is not None)


def _sampling_problem(sampling: SamplingParams, vocab_size: int, is_read_only: bool) -> InvalidRequest | None:
    numbers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.presence_penalty,
               sampling.frequency_penalty, sampling.repetition_penalty)  # fmt: skip
    least = 0 if is_read_only or sampling.prompt_logprobs is not None else 1
    rules = (
        (all(math.isfinite(n) for n in numbers), "sampling", "a sampling parameter is not a finite number"),
        (
            sampling.max_tokens >= least,
            "max_tokens",
            f"max_tokens is {sampling.max_tokens}; it must be at least {least}",
        ),
        (0 <= sampling.min_tokens <= sampling.max_tokens, "min_tokens", "min_tokens must lie in [0, max_tokens]"),
        (sampling.temperature >= 0, "temperature", "temperature must not be negative"),
        (sampling.top_k >= 0, "top_k", "top_k must not be negative; 0 switches it off"),
        (0 < sampling.top_p <= 1, "top_p", "top_p must lie in (0, 1]"),
        (0 <= sampling.min_p <= 1, "min_p", "min_p must lie in [0, 1]"),
        (sampling.repetition_penalty > 0, "repetition_penalty", "repetition_penalty must be positive"),
        (
            all(0 <= token < vocab_size and math.isfinite(bias) for token, bias in sampling.logit_bias),
            "logit_bias",
            f"logit_bias names a token outside the vocabulary of {vocab_size}, or a bias that is not finite",
        ),
    )
    for is_kept, param, message in rules:
        if not is_kept:
            return InvalidRequest(message, param=param)
    return None

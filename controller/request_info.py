"""What the core is told of a request: lengths, names and a hash, never its tokens. Pure."""

import array

import xxhash

from nearline.controller.events import RequestInfo
from nearline.protocol import Request

_NUM_PREFIX_TOKENS = 64


def describe(request: Request) -> RequestInfo:
    """Make the core's view of a request."""
    return RequestInfo(
        request_id=request.request_id,
        model_id=request.model_id,
        num_prompt_tokens=len(request.prompt_token_ids),
        max_tokens=request.sampling.max_tokens,
        tenant=request.tenant,
        slo=request.slo,
        adapter_id=request.adapter_id,
        adapter_digest=request.adapter_digest,
        prefix_hash=_prefix_hash(request),
        priority=request.priority,
    )


def _prefix_hash(request: Request) -> int:
    """Equal for prompts whose first tokens an instance may share: same tokens, adapter and salt."""
    head = request.prompt_token_ids[:_NUM_PREFIX_TOKENS]
    if len(head) < _NUM_PREFIX_TOKENS // 2:
        return 0
    owner = f"{request.adapter_digest}/{request.salt}".encode()
    return xxhash.xxh64_intdigest(array.array("Q", head).tobytes() + owner)

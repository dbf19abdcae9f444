"""What a client asked for, as it crosses processes: token ids only, never text. Everything here is immutable."""

from dataclasses import dataclass, field
from enum import StrEnum

from nearline.protocol.errors import ErrorInfo
from nearline.protocol.ids import Digest, ModelId, RequestId, Seconds, TenantId

MAX_SYMBOLS = 100_000
MAX_LEXER_STATES = 50_000
"""Of one grammar, when it is checked and when it is compiled; a state takes one or two kilobytes."""
MAX_LEXER_FUEL = 150_000
"""Expressions that a grammar's lexer may make before its first token; 9,000 values of an enum need over 100,000."""


class FinishReason(StrEnum):
    """Why a sequence ended in the engine. A stop *string* is seen only by the controller, which then aborts."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class SloClass(StrEnum):
    INTERACTIVE = "interactive"
    BATCH_1M = "batch-1m"
    BATCH_1H = "batch-1h"


class GrammarKind(StrEnum):
    """How a grammar is written: as a JSON schema, a regular expression, or in llguidance's dialect of Lark."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole answer must look like. Its state derives from the generated tokens, so any resume is exact."""

    kind: GrammarKind
    source: str


class Pooling(StrEnum):
    """How a prompt becomes one vector: the final hidden state of its last token, or the mean over all of them."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. A pure function of (logits, tokens so far, seed, position), so any resume is exact.

    temperature 0 is greedy; top_k 0 and top_p 1.0 switch their filters off; `logprobs` is the number of
    alternatives to report per token (None: none, 0: the chosen token only), `prompt_logprobs` the same for every
    prompt token but the first. With it, max_tokens may be 0: the prompt is scored and nothing generated.
    A sequence ends when its `grammar` is complete; the grammar decides alone, whatever min_tokens says.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets as durations from arrival (clocks of machines differ). None: no target."""

    slo_class: SloClass = SloClass.INTERACTIVE
    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    deadline_s: Seconds | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. `salt` separates tenants in the prefix cache; `arrived_at` stays at the controller.

    Of two that wait in one engine the smaller `priority` number is first, then the earlier arrival.
    With `pooling` it asks for one vector instead of tokens; max_tokens is 0 then.
    """

    request_id: RequestId
    model_id: ModelId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    slo: Slo = field(default_factory=Slo)
    tenant: TenantId = TenantId("default")
    adapter_id: ModelId | None = None
    adapter_digest: Digest | None = None
    priority: int = 0
    salt: str = ""
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a chosen token and of its most likely alternatives, each as (token_id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceTimings:
    """Where a sequence's first token spent its time inside the engine."""

    waiting_s: Seconds
    adapter_s: Seconds
    prefill_s: Seconds
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """New tokens of one sequence after one engine step.

    `attempt` is the dispatch it answers: the controller ignores updates of an attempt it gave up.
    The token that stops a sequence (end of text or a stop id) is reported like any other: the last of `token_ids`.
    `timings` comes with the first token of an attempt. `error` is set exactly when finish_reason is ERROR.
    `prompt_logprobs` (all prompt tokens but the first) come with the request's first token, or with the end if it
    generates none. `embedding`, little-endian fp32, comes with the end of a request that asked for `pooling`.
    """

    request_id: RequestId
    attempt: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    timings: SequenceTimings | None = None
    error: ErrorInfo | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    embedding: bytes | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as billed. `num_cached_tokens` of the prompt came from the prefix cache."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0

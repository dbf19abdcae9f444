"""The bodies clients send, as pydantic reads them. Wrong types, NaN and numbers no frame can hold are refused.

Unknown keys are ignored where the API is another's and will grow, and refused where it is ours: a misspelt field
that changes nothing would be a wrong answer that looks right.

Source: OpenAI's API reference for the shared names; vLLM's documentation for the extra sampling parameters.
"""

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nearline.controller.http import numbers as num
from nearline.controller.http.complaints import complaint
from nearline.protocol import PEER
from nearline.protocol.errors import InvalidRequest

MAX_STOPS = 16
MAX_SOURCE_CHARS = 4096

TokenIds = list[int]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=MAX_STOPS)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("it holds control characters; a source is one line of text")
    if value.startswith(PEER):
        raise ValueError("nodes copy from each other when asked to by `nearline model copy`; name where it comes from")
    return value


Source = Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_CHARS), AfterValidator(_printable)]
"""A path or a URL."""


class Body(BaseModel):
    """Any request body."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class OwnBody(Body):
    """A body of our own API: it has no fields but those written here."""

    model_config = ConfigDict(extra="forbid")


B = TypeVar("B", bound=Body)


class StreamOptions(Body):
    include_usage: bool | None = None


def _as_text(value: Any) -> str:
    if not isinstance(value, dict):
        raise ValueError("an object")
    try:
        return json.dumps(value)
    except RecursionError:
        raise ValueError("a schema that is nested less deeply") from None


class JsonSchemaFormat(Body):
    """`schema_` is written as text where the body is read: on the event loop only if it is small."""

    name: str = "answer"
    schema_: Annotated[str, BeforeValidator(_as_text)] | None = Field(None, alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1000)]


class OfferFields(Body):
    """What every request of a function is promised unless it says something else."""

    slo: Literal["interactive", "batch-1m", "batch-1h"] | None = None
    ttft_ms: num.TtftMs | None = None
    tpot_ms: num.TpotMs | None = None
    deadline_ms: num.DeadlineMs | None = None


class PromiseFields(OfferFields):
    """What a client expects of the service: how soon, and how it ranks among its own."""

    priority: num.Priority = 0
    deadline_s: num.DeadlineS | None = None


class SamplingBody(PromiseFields):
    """How to sample: OpenAI's names and vLLM's extras, on every endpoint that generates."""

    default_temperature: ClassVar[float] = 1.0

    max_tokens: num.CountOrZero | None = None
    min_tokens: num.CountOrZero = 0
    temperature: num.Temperature | None = None
    top_p: num.Share | None = None
    top_k: num.TopK | None = None
    min_p: num.Share | None = None
    presence_penalty: num.Penalty = 0.0
    frequency_penalty: num.Penalty = 0.0
    repetition_penalty: num.RepetitionPenalty | None = None
    logit_bias: dict[str, num.Bias] | None = None
    response_format: ResponseFormat | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    seed: num.Seed | None = None
    stop: Annotated[Stops | None, BeforeValidator(_as_list)] = None
    stop_token_ids: TokenIds = Field(default_factory=list, max_length=1000)
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: num.Choices | None = 1

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class MessageBody(BaseModel):
    """One turn of a conversation. What it holds beyond these fields goes to the chat template unchanged."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Any] | None = None


Messages = Annotated[list[MessageBody], Field(min_length=1)]


class ChatFields(Body):
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(SamplingBody, ChatFields):
    """POST /v1/chat/completions"""

    model: str
    messages: Messages
    max_completion_tokens: num.Count | None = None
    max_tokens: num.Count | None = None
    logprobs: bool | None = False
    top_logprobs: num.Alternatives | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions"""

    model: str
    prompt: str | list[str] | TokenIds | list[TokenIds] | None = None
    logprobs: num.Alternatives | None = None
    echo: bool | None = False
    best_of: num.Count | None = None
    suffix: str | None = None


class FunctionBody(SamplingBody, ChatFields, OwnBody):
    """POST /v1/functions/{name}/invocations: either `prompt` or `messages`. The same input gives the same answer."""

    default_temperature: ClassVar[float] = 0.0

    prompt: str | TokenIds | None = None
    messages: Messages | None = None
    n: num.OneChoice | None = 1


class EmbeddingBody(PromiseFields):
    """POST /v1/embeddings"""

    model: str
    input: str | list[str] | TokenIds | list[TokenIds]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: num.Count | None = None
    pooling: Literal["last", "mean"] | None = None


class JobBody(OwnBody):
    """POST /v1/jobs: `input` is the body that `endpoint` would take (default: the function named `model`)."""

    model: str
    input: dict[str, Any]
    endpoint: Literal["function", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"] = "function"
    deadline_s: num.JobDeadlineS = 86_400.0
    max_attempts: num.Attempts = 3


class ModelBody(OfferFields, OwnBody):
    """POST /admin/models"""

    name: str
    source: Source
    keep_alive_s: num.KeepAliveS = 300.0
    min_replicas: num.MinReplicas = 0
    max_replicas: num.MaxReplicas = 1
    keep_alive_min_s: num.KeepAliveMinS | None = None
    pooling: Literal["last", "mean"] = "last"
    quantize: Literal["int8", "int4"] | None = None
    replace: bool = False


class ModelPatch(OfferFields, OwnBody):
    """PATCH /admin/models/{name}: what is named changes, null takes a promise or a minimum away."""

    keep_alive_s: num.KeepAliveS = 300.0
    keep_alive_min_s: num.KeepAliveMinS | None = None
    min_replicas: num.MinReplicas = 0
    max_replicas: num.MaxReplicas = 1
    pooling: Literal["last", "mean"] = "last"


class AdapterBody(OwnBody):
    """POST /admin/adapters"""

    name: str
    base: str
    source: Source
    replace: bool = False


def parse(cls: type[B], data: bytes | str | dict[str, Any]) -> B:
    """Read a JSON body, or one already read as an object. Raises InvalidRequest naming the first wrong field."""
    try:
        return cls.model_validate(data) if isinstance(data, dict) else cls.model_validate_json(data)
    except ValidationError as error:
        where, text = complaint(cls, error, data)
        raise InvalidRequest(f"{where or 'body'}: {text}", param=where) from None

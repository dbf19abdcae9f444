"""The bodies clients send, as pydantic reads them. Wrong types, NaN and numbers no frame can hold are refused.

Unknown keys are ignored where the API is another's and will grow, and refused where it is ours: a misspelt field
that changes nothing would be a wrong answer that looks right.

Source: OpenAI's API reference for the shared names; vLLM's documentation for the extra sampling parameters.
"""

import difflib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nearline.protocol import PEER
from nearline.protocol.errors import InvalidRequest

MAX_STOPS = 16
MAX_CHOICES = 128
MAX_COUNT = 2**31 - 1
MAX_SOURCE_CHARS = 4096
MAX_SPAN = 1e9
"""Of a time in seconds or milliseconds: clocks take no longer ones."""

EVER = -1.0
"""A keep-alive without an end."""

TokenIds = list[int]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=MAX_STOPS)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _keep_alive(value: float) -> float:
    if value != EVER and not 0 <= value <= MAX_SPAN:
        raise ValueError(f"a keep-alive is 0 to {MAX_SPAN:g} seconds, or {EVER:g} for ever")
    return value


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


class JsonSchemaFormat(Body):
    name: str = "answer"
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1000)]


class OfferFields(Body):
    """What every request of a function is promised unless it says something else."""

    slo: Literal["interactive", "batch-1m", "batch-1h"] | None = None
    ttft_ms: float | None = Field(None, gt=0, le=MAX_SPAN)
    tpot_ms: float | None = Field(None, gt=0, le=MAX_SPAN)
    deadline_ms: float | None = Field(None, gt=0, le=MAX_SPAN)


class PromiseFields(OfferFields):
    """What a client expects of the service: how soon, and how it ranks among its own."""

    priority: int = Field(0, ge=-1000, le=1000)
    deadline_s: float | None = Field(None, gt=0, le=MAX_SPAN)


class SamplingBody(PromiseFields):
    """How to sample: OpenAI's names and vLLM's extras, on every endpoint that generates."""

    default_temperature: ClassVar[float] = 1.0

    max_tokens: int | None = Field(None, ge=0, le=MAX_COUNT)
    min_tokens: int = Field(0, ge=0, le=MAX_COUNT)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_COUNT)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[Stops | None, BeforeValidator(_as_list)] = None
    stop_token_ids: TokenIds = Field(default_factory=list, max_length=1000)
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)

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
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    max_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionBody(SamplingBody):
    """POST /v1/completions"""

    model: str
    prompt: str | list[str] | TokenIds | list[TokenIds] | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = False
    best_of: int | None = Field(None, ge=1, le=MAX_COUNT)
    suffix: str | None = None


class FunctionBody(SamplingBody, ChatFields, OwnBody):
    """POST /v1/functions/{name}/invocations: either `prompt` or `messages`. The same input gives the same answer."""

    default_temperature: ClassVar[float] = 0.0

    prompt: str | TokenIds | None = None
    messages: Messages | None = None
    n: Literal[1] | None = 1


class EmbeddingBody(PromiseFields):
    """POST /v1/embeddings"""

    model: str
    input: str | list[str] | TokenIds | list[TokenIds]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(None, ge=1, le=MAX_COUNT)
    pooling: Literal["last", "mean"] | None = None


class JobBody(OwnBody):
    """POST /v1/jobs: `input` is the body that `endpoint` would take (default: the function named `model`)."""

    model: str
    input: dict[str, Any]
    endpoint: Literal["function", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"] = "function"
    deadline_s: float = Field(86_400.0, gt=0, le=30 * 86_400)
    max_attempts: int = Field(3, ge=1, le=100)


class ModelBody(OfferFields, OwnBody):
    """POST /admin/models"""

    name: str
    source: Source
    keep_alive_s: Annotated[float, AfterValidator(_keep_alive)] = 300.0
    min_replicas: int = Field(0, ge=0, le=1000)
    max_replicas: int = Field(1, ge=1, le=1000)
    keep_alive_min_s: float | None = Field(None, ge=0, le=MAX_SPAN)
    pooling: Literal["last", "mean"] = "last"
    quantize: Literal["int8", "int4"] | None = None
    replace: bool = False


class ModelPatch(OfferFields, OwnBody):
    """PATCH /admin/models/{name}: what is named changes, null takes a promise or a minimum away."""

    keep_alive_s: Annotated[float, AfterValidator(_keep_alive)] = 300.0
    keep_alive_min_s: float | None = Field(None, ge=0, le=MAX_SPAN)
    min_replicas: int = Field(0, ge=0, le=1000)
    max_replicas: int = Field(1, ge=1, le=1000)
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
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise InvalidRequest(f"the body is not JSON: {first['msg']}") from None
        # Members of unions show up in the path under their type's name; clients know fields and indices only.
        is_unknown = first["type"] == "extra_forbidden"
        path = [str(part) for part in first["loc"] if isinstance(part, int) or is_unknown or str(part).isidentifier()]
        where = ".".join(path) or None
        text = _unknown(cls, path[-1]) if is_unknown else first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{where or 'body'}: {text}", param=where) from None


def _unknown(cls: type[Body], name: str) -> str:
    near = difflib.get_close_matches(name, cls.model_fields, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(cls.model_fields))}"
    return f"there is no such field; {hint}"

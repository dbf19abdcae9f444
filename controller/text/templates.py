"""Chat templates: a conversation becomes one prompt, in a sandbox that cannot reach Python and cannot run for ever.

The environment offers what transformers' own does, so templates written for it render the same.
Source: https://huggingface.co/docs/transformers/chat_templating_writing
"""

import asyncio
import datetime
import json
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import structlog
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nearline.controller.shown import shown
from nearline.controller.text.render_thread import RenderThread
from nearline.controller.text.template_bounds import MAX_REPEATED_CHARS, is_large_call, is_large_operation
from nearline.protocol.errors import InvalidRequest, UnsupportedCheckpoint

log = structlog.get_logger(__name__)

Message = Mapping[str, Any]

Outcome = str | InvalidRequest

RENDER_LIMIT_S = 2.0
QUICK_S = 0.02
"""Of computing: a template that took more is rendered in one of few places until it has been quick again."""
_renders = RenderThread[Outcome]("chat-template")


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; serving renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if is_large_operation(operator, left, right):
            raise jinja2.TemplateRuntimeError(f"{operator!r} of such sizes is not allowed in a chat template")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as the base class)
        if is_large_call(__obj, [*args, *kwargs.values()]):
            raise jinja2.TemplateRuntimeError("a text of such a width is not allowed in a chat template")
        return super().call(__context, __obj, *args, **kwargs)


def _center(value: str, width: int = 80) -> str:
    if width > MAX_REPEATED_CHARS:
        raise jinja2.TemplateRuntimeError("a text of such a width is not allowed in a chat template")
    return str(value).center(width)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    if is_large_operation("%", str(value), args):
        raise jinja2.TemplateRuntimeError("a text of such a width is not allowed in a chat template")
    return do_format(value, *args, **kwargs)


class _Raised(jinja2.TemplateRuntimeError):
    """The template's own words through raise_exception."""


def _raise_exception(message: str) -> NoReturn:
    raise _Raised(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _environment() -> _Environment:
    extensions: list[Any] = ["jinja2.ext.loopcontrols", _GenerationTag]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters.update(tojson=_tojson, center=_center, format=_format)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template with the special tokens it may name. Raises UnsupportedCheckpoint when it is not Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source
        self._is_quick = False
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UnsupportedCheckpoint(f"the chat template does not compile: line {error.lineno}: {error}") from None
        except Exception as error:  # Python's own compiler has limits too: of depth, of blocks, of memory
            log.info("chat template does not compile", error=repr(error)[:500])
            text = "the chat template does not compile: it is nested too deeply or too large; simplify it"
            raise UnsupportedCheckpoint(text) from None

    async def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, options: Mapping[str, Any] | None = None
    ) -> str:
        """Render the prompt up to the assistant's turn.

        Raises InvalidRequest with the template's own message when it refuses the conversation, Overloaded when others
        that take long leave no place.
        """
        variables: dict[str, Any] = {
            **self._special_tokens,
            "add_generation_prompt": True,
            "documents": None,
            **(options or {}),
            "messages": [_normal(message, self._knows_developer) for message in messages],
            "tools": list(tools) if tools else None,
        }
        try:
            outcome = await _renders.run(lambda: self._timed(variables), RENDER_LIMIT_S, self._is_quick)
        except TimeoutError:
            self._is_quick = False
            text = f"the chat template ran for more than {RENDER_LIMIT_S:g} s; simplify it"
            raise InvalidRequest(text, param="messages") from None
        if isinstance(outcome, Exception):
            if outcome.__cause__ is not None:
                log.info("chat template failed", error=repr(outcome.__cause__))
            raise outcome
        return outcome

    def _timed(self, variables: dict[str, Any]) -> Outcome:
        started = time.thread_time()
        outcome = _outcome(self._template, variables)
        self._is_quick = time.thread_time() - started <= QUICK_S
        return outcome


class ChatTemplates:
    """A model's chat templates by name. Each is compiled at its first use, beside the event loop."""

    def __init__(self, named: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._named = named
        self._special_tokens = special_tokens
        self._compiled: dict[str, ChatTemplate] = {}

    @property
    def has_default(self) -> bool:
        """Whether there is one for conversations without tools."""
        return choose_template(self._named, has_tools=False) is not None

    async def get(self, has_tools: bool) -> ChatTemplate | None:
        """Give the one for conversations with tools, or without. Raises UnsupportedCheckpoint as ChatTemplate does."""
        source = choose_template(self._named, has_tools)
        if source is None:
            return None
        if source not in self._compiled:
            self._compiled[source] = await asyncio.to_thread(ChatTemplate, source, self._special_tokens)
        return self._compiled[source]


def _outcome(template: jinja2.Template, variables: dict[str, Any]) -> Outcome:
    """Render; what goes wrong is the client's or the template's fault and is returned."""
    try:
        return template.render(variables)
    except _Raised as error:
        return InvalidRequest(f"the chat template refused the messages: {error.message}", param="messages")
    except RecursionError:
        return InvalidRequest("the chat template recurses without end", param="messages")
    except Exception as error:
        text = f"the model's chat template cannot render these messages{_template_line(error)}; it may not know their"
        refusal = InvalidRequest(f"{text} roles, fields or chat_template_kwargs", param="messages")
        refusal.__cause__ = error
        return refusal


def _template_line(error: Exception) -> str:
    """Where in the template an error came up, if that can be told: its frames carry the template's own lines."""
    frames = [row for row in traceback.extract_tb(error.__traceback__) if row.filename == "<template>"]
    return f" (line {frames[-1].lineno} of the template)" if frames else ""


def _normal(message: Message, knows_developer: bool) -> dict[str, Any]:
    """Bring a message to the form templates expect: string content, a role the template has heard of."""
    plain = {key: value for key, value in message.items() if value is not None}
    if plain.get("role") == "developer" and not knows_developer:
        plain["role"] = "system"
    plain["content"] = _content_text(message.get("content"))
    return plain


def _content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = f"type {shown(part.get('type'))}" if isinstance(part, Mapping) else shown(part)
            text = f"a content part is {kind}; expected parts {{'type': 'text', 'text': …}}"
            raise InvalidRequest(text, param="messages")
    return "\n".join(texts)


def choose_template(named: Mapping[str, str], has_tools: bool) -> str | None:
    """Pick among a model's named templates: `tool_use` when tools are given, else `default`, else the only one."""
    if has_tools and "tool_use" in named:
        return named["tool_use"]
    if "default" in named:
        return named["default"]
    return next(iter(named.values())) if len(named) == 1 else None

"""POST /v1/completions. Source: OpenAI's API reference."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from nearline.controller.generation import Call
from nearline.controller.http.answers import Answer, OnFirstToken
from nearline.controller.http.bodies import Data, read_body
from nearline.controller.http.calls import choices, load, make_call, text_prompt
from nearline.controller.http.door import Caller, Door, door_of, tenant_of
from nearline.controller.http.logprobs import completion_logprobs
from nearline.controller.http.schemas import MAX_CHOICES, CompletionBody
from nearline.controller.http.sse import stream_events
from nearline.controller.text import TextModel
from nearline.controller.text_stream import TextDelta
from nearline.protocol.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 16


class Completion:
    """One completion request under way: each prompt has `n` choices, numbered through."""

    def __init__(self, body: CompletionBody, text: TextModel, answer: Answer, echoes: list[str]) -> None:
        self.body = body
        self._text = text
        self._answer = answer
        self._echoes = echoes
        self._id = f"cmpl-{answer.request_id.removeprefix('req_')}"
        self._created = int(time.time())

    @classmethod
    async def open(cls, door: Door, caller: Caller, data: Data) -> "Completion":
        """Validate, tokenise and start. Raises NearlineError; nothing runs then."""
        body = await read_body(CompletionBody, data)
        _check(body)
        target, text = await load(door, body.model)
        n = body.n or 1
        calls: list[Call] = []
        echoes: list[str] = []
        prompts = prompts_of(body)
        if len(prompts) * n > MAX_CHOICES:
            raise InvalidRequest(f"{len(prompts)} prompts of {n} choices are more than {MAX_CHOICES}", param="prompt")
        for prompt in prompts:
            ids = await text_prompt(target, text, prompt)
            call = make_call(caller, target, text, ids, body, DEFAULT_MAX_TOKENS, body.logprobs)
            calls += choices(call, n)
            echoed = "" if not body.echo else prompt if isinstance(prompt, str) else text.decode(prompt)
            echoes += [echoed] * n
        return cls(body, text, Answer(door, target, calls, len(prompts)), echoes)

    async def result(self, on_first_token: OnFirstToken | None = None) -> dict[str, Any]:
        """Wait for the whole answer."""
        found = []
        for index, choice in enumerate(await self._answer.collect(on_first_token)):
            delta = TextDelta(self._echoes[index] + choice.text, tuple(choice.tokens))
            found.append(self._choice(index, delta, choice.finish_reason))
        return {**self._head(), "choices": found, "usage": self._answer.usage}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield chunks of text, at the end each choice's reason and, when asked, the usage."""
        async with aclosing(self._answer.pieces()) as pieces:
            for index, echo in enumerate(self._echoes):
                if echo:
                    yield self._chunk(index, TextDelta(echo))
            async for index, delta in pieces:
                if delta.text or delta.tokens:
                    yield self._chunk(index, delta)
        for index, reason in enumerate(self._answer.finish_reasons):
            yield self._chunk(index, TextDelta(""), reason)
        if self.body.includes_usage:
            yield {**self._head(), "choices": [], "usage": self._answer.usage}

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self.body.model}

    def _choice(self, index: int, delta: TextDelta, reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = completion_logprobs(self._text, delta.tokens, len(self._echoes[index]))
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, index: int, delta: TextDelta, reason: str | None = None) -> dict[str, Any]:
        chunk = {**self._head(), "choices": [self._choice(index, delta, reason)]}
        return {**chunk, "usage": None} if self.body.includes_usage else chunk


def _check(body: CompletionBody) -> None:
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("log-probabilities of the prompt are not supported: echo without logprobs", param="echo")
    if body.best_of not in (None, body.n or 1):
        raise InvalidRequest("best_of is not supported; use n and choose yourself", param="best_of")
    if body.suffix:
        raise InvalidRequest("suffix is not supported; put both parts into the prompt", param="suffix")


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a body, one or many. Raises InvalidRequest for an empty list."""
    if body.prompt is None:
        return [""]
    if isinstance(body.prompt, str):
        return [body.prompt]
    if not body.prompt:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    ids = [item for item in body.prompt if isinstance(item, int)]
    return [ids] if ids else [item for item in body.prompt if not isinstance(item, int)]


async def completions(request: web.Request) -> web.StreamResponse:
    door = door_of(request)
    completion = await Completion.open(door, Caller(tenant_of(request)), await request.read())
    if completion.body.stream:
        return await stream_events(request, completion.events(), door.heartbeat_s)
    return web.json_response(await completion.result())

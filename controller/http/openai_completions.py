"""POST /v1/completions. Source: OpenAI's API reference."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from aiohttp import web

from nearline.controller.http.answers import Answer, OnFirstToken
from nearline.controller.http.bodies import Data, read_body
from nearline.controller.http.calls import choices, load, make_call, text_prompt
from nearline.controller.http.constraints import bounded, grammar_of
from nearline.controller.http.door import Caller, Door, caller_of, door_of
from nearline.controller.http.generation import Call
from nearline.controller.http.logprobs import Echo, completion_logprobs, echo_logprobs, joined
from nearline.controller.http.numbers import MAX_CHOICES
from nearline.controller.http.replies import reply
from nearline.controller.http.schemas import CompletionBody
from nearline.controller.text.models import TextModel
from nearline.controller.text.stream import TextDelta
from nearline.protocol.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 16


class Completion:
    """One completion request under way: each prompt has `n` choices, numbered through."""

    def __init__(self, body: CompletionBody, text: TextModel, answer: Answer, echoes: list[Echo]) -> None:
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
        echoes: list[Echo] = []
        prompts, grammar = prompts_of(body), await grammar_of(door, caller.tenant, body)
        if len(prompts) * n > MAX_CHOICES:
            raise InvalidRequest(f"{len(prompts)} prompts of {n} choices are more than {MAX_CHOICES}", param="prompt")
        for prompt in prompts:
            ids = await text_prompt(target, text, prompt)
            call = bounded(make_call(caller, target, text, ids, body, DEFAULT_MAX_TOKENS, body.logprobs), grammar)
            echo = Echo()
            if body.echo:
                echo = Echo(prompt if isinstance(prompt, str) else text.vocabulary.decode(prompt), ids)
                call = _scored(call, body.logprobs)
            calls += choices(call, n)
            echoes += [echo] * n
        return cls(body, text, await Answer.open(door, caller, target, calls, len(prompts)), echoes)

    async def result(self, on_first_token: OnFirstToken | None = None) -> dict[str, Any]:
        """Wait for the whole answer."""
        found = []
        for index, choice in enumerate(await self._answer.collect(on_first_token)):
            answered = self._choice(index, TextDelta(choice.text, tuple(choice.tokens)), choice.finish_reason)
            if self.body.echo:
                echoed = self._echoed(index)
                answered["text"] = echoed["text"] + answered["text"]
                if self.body.logprobs is not None:
                    answered["logprobs"] = joined(echoed["logprobs"], answered["logprobs"])
            found.append(answered)
        return {**self._head(), "choices": found, "usage": self._answer.usage}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield chunks of text, at the end each choice's reason and, when asked, the usage."""
        unsaid = set(range(len(self._echoes))) if self.body.echo else set()
        async with aclosing(self._answer.pieces()) as pieces:
            if self.body.logprobs is None:
                for index in sorted(unsaid):
                    yield self._chunk(self._echoed(index))
                unsaid.clear()
            async for index, delta in pieces:
                if index in unsaid:  # the log-probabilities of its prompt came with its first token
                    unsaid.remove(index)
                    yield self._chunk(self._echoed(index))
                if delta.text or delta.tokens:
                    yield self._chunk(self._choice(index, delta, None))
        for index, reason in enumerate(self._answer.finish_reasons):
            yield self._chunk(self._choice(index, TextDelta(""), reason))
        if self.body.includes_usage:
            yield {**self._head(), "choices": [], "usage": self._answer.usage}

    def close(self) -> None:
        self._answer.close()

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self.body.model}

    def _choice(self, index: int, delta: TextDelta, reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = completion_logprobs(self._text, delta.tokens, len(self._echoes[index].text))
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": reason}

    def _echoed(self, index: int) -> dict[str, Any]:
        """The prompt as the first part of a choice."""
        echo, logprobs = self._echoes[index], None
        if self.body.logprobs is not None:
            known = self._answer.generations[index].prompt_logprobs or ()
            logprobs = echo_logprobs(self._text, echo, known)
        return {"index": index, "text": echo.text, "logprobs": logprobs, "finish_reason": None}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(), "choices": [choice]}
        return {**chunk, "usage": None} if self.body.includes_usage else chunk


def _check(body: CompletionBody) -> None:
    if body.best_of not in (None, body.n or 1):
        raise InvalidRequest("best_of is not supported; use n and choose yourself", param="best_of")
    if body.suffix:
        raise InvalidRequest("suffix is not supported; put both parts into the prompt", param="suffix")


def _scored(call: Call, logprobs: int | None) -> Call:
    """Ask for the log-probabilities of the prompt, too."""
    sampling = replace(call.request.sampling, prompt_logprobs=logprobs)
    return replace(call, request=replace(call.request, sampling=sampling))


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
    completion = await Completion.open(door_of(request), caller_of(request), await request.read())
    return await reply(request, completion, bool(completion.body.stream))

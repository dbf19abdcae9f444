"""POST /v1/chat/completions. Source: OpenAI's API reference."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from nearline.controller.http.answers import Answer, OnFirstToken
from nearline.controller.http.bodies import Data, read_body
from nearline.controller.http.calls import UNLIMITED, chat_prompt, choices, load, make_call
from nearline.controller.http.constraints import bounded, grammar_of
from nearline.controller.http.door import Caller, Door, caller_of, door_of
from nearline.controller.http.logprobs import chat_logprobs
from nearline.controller.http.replies import reply
from nearline.controller.http.schemas import ChatBody
from nearline.controller.text.models import TextModel
from nearline.controller.text.stream import TextDelta
from nearline.protocol.errors import InvalidRequest


class ChatCompletion:
    """One chat request under way, and the two ways to tell its answer."""

    def __init__(self, body: ChatBody, text: TextModel, answer: Answer) -> None:
        self.body = body
        self._text = text
        self._answer = answer
        self._id = f"chatcmpl-{answer.request_id.removeprefix('req_')}"
        self._created = int(time.time())

    @classmethod
    async def open(cls, door: Door, caller: Caller, data: Data) -> "ChatCompletion":
        """Validate, tokenise and start. Raises NearlineError; nothing runs then."""
        body = await read_body(ChatBody, data)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        target, text = await load(door, body.model)
        prompt = await chat_prompt(target, text, body, body.messages)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        call = make_call(caller, target, text, prompt, body, UNLIMITED, logprobs)
        call = bounded(call, await grammar_of(door, caller.tenant, body))
        return cls(body, text, await Answer.open(door, caller, target, choices(call, body.n or 1)))

    async def result(self, on_first_token: OnFirstToken | None = None) -> dict[str, Any]:
        """Wait for the whole answer."""
        found = []
        for index, choice in enumerate(await self._answer.collect(on_first_token)):
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            logprobs = chat_logprobs(self._text, choice.tokens) if self.body.logprobs else None
            found.append(
                {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}
            )
        return {**self._head("chat.completion"), "choices": found, "usage": self._answer.usage}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield chunks: first the role, then text, at the end each choice's reason and, when asked, the usage."""
        num_choices = self.body.n or 1
        async with aclosing(self._answer.pieces()) as pieces:
            for index in range(num_choices):
                yield self._chunk(index, {"role": "assistant", "content": ""})
            async for index, delta in pieces:
                if delta.text or delta.tokens:
                    yield self._chunk(index, {"content": delta.text}, delta)
        for index, reason in enumerate(self._answer.finish_reasons):
            yield self._chunk(index, {}, reason=reason)
        if self.body.includes_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._answer.usage}

    def close(self) -> None:
        self._answer.close()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.body.model}

    def _chunk(
        self, index: int, delta: dict[str, Any], piece: TextDelta | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        logprobs = chat_logprobs(self._text, piece.tokens) if self.body.logprobs and piece is not None else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self.body.includes_usage else chunk


async def chat_completions(request: web.Request) -> web.StreamResponse:
    completion = await ChatCompletion.open(door_of(request), caller_of(request), await request.read())
    return await reply(request, completion, bool(completion.body.stream))

"""One prompt on its way to text: a request opened at the runtime, its tokens decoded, its end decided once."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from nearline.controller.http.ports import FleetPort, RequestStream
from nearline.controller.text.models import TextModel
from nearline.controller.text.stream import TextDelta, TextStream
from nearline.protocol import Request, TokenLogprob, Usage
from nearline.protocol.errors import NearlineError


@dataclass(frozen=True, slots=True)
class Call:
    """A request with what its answer needs: the text model, the stop strings and the ids that have no text."""

    request: Request
    text: TextModel
    stops: tuple[str, ...] = ()
    hidden_ids: frozenset[int] = frozenset()
    continues_prompt: bool = False
    """The text goes on where the prompt ends (completions), so a leading space counts."""


class Generation:
    """One running call. Owns: its request handle, cancelled when the reader leaves early.

    `finish_reason` is "stop" or "length" once the deltas have ended. `prompt_logprobs`, if asked for, are there
    before the first delta; `embedding` after the last.
    """

    def __init__(self, runtime: FleetPort, call: Call) -> None:
        sampling = call.request.sampling
        context = call.request.prompt_token_ids[-4:] if call.continues_prompt else ()
        self._call = call
        self._stream = TextStream(
            call.text.vocabulary.detokenizer(context), call.stops, call.hidden_ids, sampling.min_tokens
        )  # fmt: skip
        self._handle: RequestStream = runtime.open(call.request)
        self._num_cached_tokens = 0
        self._is_over = False
        self.finish_reason: str | None = None
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self.embedding: bytes | None = None

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Yield text as it becomes certain; the last delta may be empty. Raises the request's NearlineError."""
        try:
            async for update in self._handle:
                if update.timings is not None:
                    self._num_cached_tokens = update.timings.num_cached_tokens
                if update.prompt_logprobs is not None:
                    self.prompt_logprobs = update.prompt_logprobs
                self.embedding = update.embedding
                delta = self._stream.push(update.token_ids, update.logprobs)
                if delta.is_stopped:
                    self._end("stop")
                    yield delta
                    return
                if update.finish_reason is None:
                    yield delta
                    continue
                self._is_over = True
                self.finish_reason = str(update.finish_reason)
                rest = self._stream.finish()
                if rest.is_stopped:
                    self.finish_reason = "stop"
                yield TextDelta(delta.text + rest.text, delta.tokens + rest.tokens, rest.is_stopped)
                return
            raise NearlineError("the runtime ended a request without a reason")
        finally:
            self.cancel()

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        self.cancel()

    def cancel(self) -> None:
        """Stop generating, wherever the request is. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._handle.cancel()

    @property
    def usage(self) -> Usage:
        num_prompt = len(self._call.request.prompt_token_ids)
        return Usage(num_prompt, self._stream.num_tokens, min(self._num_cached_tokens, num_prompt))

    @property
    def num_tokens(self) -> int:
        return self._stream.num_tokens

    @property
    def timings(self) -> Any:
        return self._handle.timings


class NoGeneration:
    """The answer of a call that asked for no token: it never reaches the fleet."""

    finish_reason = "length"
    num_tokens = 0
    timings = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def __init__(self, call: Call) -> None:
        self.usage = Usage(len(call.request.prompt_token_ids), 0)

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        yield TextDelta("")

    def cancel(self) -> None:
        pass

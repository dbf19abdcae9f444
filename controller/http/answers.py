"""All choices of one request together: opened as one, merged as they speak, measured, and cancelled as one."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from nearline.controller.durable.registry import Target
from nearline.controller.durable.token_limits import Reservation
from nearline.controller.http.calls import most_tokens
from nearline.controller.http.door import Caller, Door
from nearline.controller.http.generation import Call, Generation, NoGeneration
from nearline.controller.text.stream import TextDelta, TokenText
from nearline.protocol import Usage, to_plain
from nearline.protocol.errors import Cancelled, ErrorInfo

Piece = tuple[int, TextDelta]
OnFirstToken = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Choice:
    """One choice, complete."""

    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    finish_reason: str | None = None


class Answer:
    """The running choices of a request. Raises on creation when the fleet refuses any of them.

    Owns: their generations from then on; whoever made it closes it, for `pieces` may never begin.
    `num_prompts` prompts have the same number of choices each, in order.
    """

    def __init__(
        self, door: Door, target: Target, calls: Sequence[Call], reservation: Reservation, num_prompts: int = 1
    ) -> None:
        self._reservation = reservation
        self._metrics = door.metrics.of(target.model.model_id)
        self._num_prompts = num_prompts
        self.request_id = calls[0].request.request_id
        self._started_at = time.monotonic()
        self._is_measured = False
        self.generations: list[Generation | NoGeneration] = []
        try:
            for call in calls:
                sampling = call.request.sampling
                is_empty = sampling.max_tokens == 0 and sampling.prompt_logprobs is None
                self.generations.append(NoGeneration(call) if is_empty else Generation(door.runtime, call))
        except Exception as error:
            self._failed(error)
            self._cancel()
            raise

    @classmethod
    async def open(
        cls, door: Door, caller: Caller, target: Target, calls: Sequence[Call], num_prompts: int = 1
    ) -> "Answer":
        """Reserve the tenant's tokens, then start. Raises RateLimited, or what the fleet refuses it with."""
        reservation = await door.limits.reserve(door.state, caller.tenant, most_tokens(calls))
        return cls(door, target, calls, reservation, num_prompts)

    def close(self) -> None:
        """End every choice, wherever it is. Idempotent."""
        self._failed(Cancelled(""))
        self._cancel()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield (choice, text) as it comes. Leaving early cancels every choice."""
        last_at: float | None = None
        try:
            async with aclosing(_merge(self.generations)) as merged:
                async for index, delta in merged:
                    now = time.monotonic()
                    if last_at is None:
                        self._metrics.first_token(now - self._started_at)
                        self._metrics.held(getattr(self.generations[index].timings, "queued_s", 0.0))
                    elif len(self.generations) == 1:
                        self._metrics.next_token(now - last_at)
                    last_at = now
                    yield index, delta
            self._is_measured = True
            self._metrics.finished(time.monotonic() - self._started_at, self.total, self.finish_reasons)
        except (asyncio.CancelledError, GeneratorExit):
            self._failed(Cancelled(""))
            raise
        except Exception as error:
            self._failed(error)
            raise
        finally:
            self._cancel()

    async def collect(self, on_first_token: OnFirstToken | None = None) -> list[Choice]:
        """Wait for everything."""
        found = [Choice() for _ in self.generations]
        async with aclosing(self.pieces()) as pieces:
            async for index, delta in pieces:
                if on_first_token is not None:
                    await on_first_token()
                    on_first_token = None
                found[index].text += delta.text
                found[index].tokens += delta.tokens
        for choice, reason in zip(found, self.finish_reasons, strict=True):
            choice.finish_reason = reason
        return found

    def _failed(self, error: Exception) -> None:
        if not self._is_measured:
            self._is_measured = True
            self._metrics.failed(ErrorInfo.of(error).code)

    def _cancel(self) -> None:
        for generation in self.generations:
            generation.cancel()
        total = self.total if self.generations else Usage(0, 0)
        self._reservation.settle(total.num_prompt_tokens + total.num_completion_tokens)

    @property
    def finish_reasons(self) -> list[str | None]:
        return [generation.finish_reason for generation in self.generations]

    @property
    def total(self) -> Usage:
        """Tokens of all choices; a prompt counts once however many choices it has."""
        usages = [generation.usage for generation in self.generations]
        prompts = usages[:: max(len(usages) // self._num_prompts, 1)]
        return Usage(
            sum(usage.num_prompt_tokens for usage in prompts),
            sum(usage.num_completion_tokens for usage in usages),
            sum(usage.num_cached_tokens for usage in prompts),
        )

    @property
    def usage(self) -> dict[str, Any]:
        """The total in OpenAI's words."""
        total = self.total
        return {
            "prompt_tokens": total.num_prompt_tokens,
            "completion_tokens": total.num_completion_tokens,
            "total_tokens": total.num_prompt_tokens + total.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": total.num_cached_tokens},
        }

    @property
    def timings(self) -> Any:
        """The waterfall of the first choice, as plain values."""
        return to_plain(self.generations[0].timings)


async def _merge(generations: Sequence[Generation | NoGeneration]) -> AsyncGenerator[Piece, None]:
    if len(generations) == 1:
        async with aclosing(generations[0].deltas()) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    news: asyncio.Queue[tuple[int, TextDelta | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, generation: Generation | NoGeneration) -> None:
        try:
            async for delta in generation.deltas():
                news.put_nowait((index, delta))
        except Exception as error:
            news.put_nowait((index, error))
        else:
            news.put_nowait((index, None))

    tasks = [asyncio.create_task(pump(i, generation)) for i, generation in enumerate(generations)]
    try:
        num_open = len(tasks)
        while num_open:
            index, item = await news.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

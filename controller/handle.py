"""One request as its caller holds it: an ordered stream of new tokens, whatever happens to the instances behind it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from nearline.protocol import (
    Bytes,
    FinishReason,
    InstanceId,
    NodeId,
    Request,
    Seconds,
    SequenceTimings,
    SequenceUpdate,
    StartTimings,
    Tier,
)
from nearline.protocol.errors import NearlineError


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where the time to the first token went. A cold start's parts are its instance's; reading overlaps binding and
    prefill, so they may add up to more than `first_token_s`, which is what the caller saw."""

    is_cold: bool
    queued_s: Seconds
    num_attempts: int
    process_s: Seconds = 0.0
    read_s: Seconds = 0.0
    read_bytes: Bytes = 0
    tier: Tier | None = None
    bind_s: Seconds = 0.0
    prefill_s: Seconds | None = None
    first_token_s: Seconds | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class InstanceTrack:
    """What the runtime saw of one instance; outlives it in the handles of the requests it served."""

    instance_id: InstanceId
    node_id: NodeId
    ensured_at: Seconds
    estimate_s: Seconds
    loaded_at: Seconds | None = None
    timings: StartTimings | None = None


class RequestHandle:
    """Async iterator of SequenceUpdate with new tokens only; the last one has a finish_reason.

    Raises the request's NearlineError from the iteration if it fails. Leaving it as a context manager, or `cancel`,
    ends the request wherever it is.
    """

    def __init__(self, request: Request, opened_at: Seconds, cancel: Callable[["RequestHandle"], None]) -> None:
        self.request = request
        self.opened_at = opened_at
        self.generated_token_ids: list[int] = []
        self.attempt = 0
        self.error: NearlineError | None = None
        self.is_ended = False
        self.track: InstanceTrack | None = None
        self._cancel = cancel
        self._updates: asyncio.Queue[SequenceUpdate | None] = asyncio.Queue()
        self._dispatched_at: Seconds | None = None
        self._first_track: InstanceTrack | None = None
        self._first_token_at: Seconds | None = None
        self._sequence_timings: SequenceTimings | None = None
        self._attempt_has_token = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SequenceUpdate:
        update = await self._updates.get()
        if update is None:
            self._updates.put_nowait(None)
            if self.error is not None:
                raise self.error
            raise StopAsyncIteration
        return update

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End the request; what was generated so far stays readable. Idempotent."""
        if not self.is_ended:
            self._cancel(self)

    @property
    def timings(self) -> RequestTimings | None:
        """The waterfall so far, or None before the first dispatch."""
        if self._dispatched_at is None or self._first_track is None:
            return None
        track, start, sequence = self._first_track, self._first_track.timings, self._sequence_timings
        is_cold = track.loaded_at is None or track.loaded_at > self.opened_at
        queued_until = max(track.ensured_at, self.opened_at) if is_cold else self._dispatched_at
        cold = start if is_cold else None
        first_at = self._first_token_at
        return RequestTimings(
            is_cold=is_cold,
            queued_s=queued_until - self.opened_at,
            num_attempts=self.attempt,
            process_s=cold.process_s if cold else 0.0,
            read_s=cold.read_s if cold else 0.0,
            read_bytes=cold.read_bytes if cold else 0,
            tier=cold.tier if cold else None,
            bind_s=cold.bind_s if cold else 0.0,
            prefill_s=sequence.prefill_s if sequence else None,
            first_token_s=None if first_at is None else first_at - self.opened_at,
            num_cached_tokens=sequence.num_cached_tokens if sequence else 0,
        )

    def dispatched(self, attempt: int, track: InstanceTrack, now: Seconds) -> None:
        """Begin an attempt; updates of earlier ones no longer count."""
        self.attempt = attempt
        self.track = track
        self._attempt_has_token = False
        if not self.generated_token_ids:
            self._dispatched_at, self._first_track = now, track

    def receive(self, update: SequenceUpdate, now: Seconds) -> bool:
        """Take an update of the current attempt. True if it brought the attempt's first token."""
        is_over = update.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        brings = bool(update.token_ids) or update.embedding is not None or update.prompt_logprobs is not None
        is_first = brings and not self._attempt_has_token
        if brings:
            self._attempt_has_token = True
            if self._first_token_at is None:
                self._first_token_at, self._sequence_timings = now, update.timings
            self.generated_token_ids.extend(update.token_ids)
        if update.token_ids or is_over:
            self._updates.put_nowait(update if is_over else replace(update, finish_reason=None, error=None))
        if is_over:
            self.end(None)
        return is_first

    def end(self, error: NearlineError | None) -> None:
        """Close the stream, after what is still in it."""
        if not self.is_ended:
            self.is_ended, self.error = True, error
            self._updates.put_nowait(None)

"""One Request inside one engine. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum

from nearline.protocol import Pooling, Request, Seconds

Order = tuple[int, Seconds, int]
"""(priority, arrival, serial number): smaller comes first."""


class SequenceState(StrEnum):
    """WAITING → RUNNING → FINISHED; RUNNING → WAITING when preempted."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A request being decoded. Positions [0, num_computed) have their KV in the blocks of `block_table`.

    While swapped out it has none, and the KV of [0, num_swapped) lies in the host's blocks of `host_table`.
    `token_ids` is the prompt, then what earlier attempts generated, then what this engine generated. The
    sequence ends at the latest when it has `max_total` tokens; the last of them is never fed to the model.
    """

    request: Request
    attempt: int
    token_ids: list[int]
    arrived_at: Seconds
    serial: int = 0
    max_total: int = 0
    cache_root: bytes = b""
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    num_cached: int = 0
    is_adapter_pinned: bool = False
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)
    num_swapped: int = 0
    must_yield: bool = False
    """Whoever stands before it in `order` may have its place; until it gets one again."""
    predicted_tokens: float | None = None
    adapter_ready_at: Seconds | None = None
    first_scheduled_at: Seconds | None = None
    first_token_at: Seconds | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, by any attempt."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def needs_token(self) -> bool:
        """Whether it continues its prompt at all, rather than being read only (scored or embedded)."""
        return self.request.pooling is None and self.request.sampling.max_tokens > 0

    @property
    def reads_prompt(self) -> bool:
        """Whether the hidden states of all prompt positions are wanted, so that none may come from the cache.

        Log-probabilities of the prompt have been reported once a token was generated, by whichever attempt.
        """
        wants_logprobs = self.request.sampling.prompt_logprobs is not None and self.num_generated == 0
        return wants_logprobs or self.request.pooling is Pooling.MEAN

    @property
    def max_positions(self) -> int:
        """KV positions that the sequence can ever need: all its tokens but the last."""
        return max(self.max_total - 1, len(self.token_ids))

    @property
    def predicted_left(self) -> float:
        """Tokens it will probably still generate, at least one. Without a prediction: all that it may."""
        sampling = self.request.sampling
        total = sampling.max_tokens if self.predicted_tokens is None else self.predicted_tokens
        return max(1.0, total - self.num_generated)

    @property
    def order(self) -> Order:
        """Who comes first: the smaller priority number, then the earlier arrival. Total and fixed for life."""
        return (self.request.priority, self.arrived_at, self.serial)

"""One Request inside one engine. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum

from nearline.protocol import Request, Seconds


class SequenceState(StrEnum):
    """WAITING → RUNNING → FINISHED; RUNNING → WAITING when preempted."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request being decoded. Positions [0, num_computed) have their KV in the blocks of `block_table`.

    `token_ids` is the prompt, then what earlier attempts generated, then what this engine generated.
    """

    request: Request
    attempt: int
    token_ids: list[int]
    arrived_at: Seconds
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    num_cached: int = 0
    block_table: list[int] = field(default_factory=list)
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

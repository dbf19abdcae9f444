"""What became of every request of a run. Words only."""

from dataclasses import dataclass, field

from nearline.protocol import ModelId, Seconds, TenantId
from nearline.simulator.arrivals import Arrival

FINISHED = "finished"
CANCELLED = "cancelled"


@dataclass(slots=True, eq=True)
class Call:
    """One request. `end` is `finished`, `cancelled` or the code of the error it was refused with."""

    arrival: Arrival
    first_at: Seconds | None = None
    ended_at: Seconds = 0.0
    num_generated: int = 0
    end: str = ""

    @property
    def ttft_s(self) -> Seconds | None:
        return None if self.first_at is None else self.first_at - self.arrival.at

    @property
    def tpot_s(self) -> Seconds | None:
        """Mean time between tokens, of an answer that was finished and has two."""
        num_gaps = self.arrival.num_output_tokens - 1
        if self.end != FINISHED or self.first_at is None or num_gaps < 1:
            return None
        return (self.ended_at - self.first_at) / num_gaps


@dataclass(slots=True)
class Outcome:
    """What a run did. `device_s` sums the time slots were held; `digest` condenses every action of the core."""

    calls: list[Call] = field(default_factory=list)
    starts: list[tuple[Seconds, ModelId]] = field(default_factory=list)
    num_events: int = 0
    num_node_losses: int = 0
    device_s: Seconds = 0.0
    digest: str = ""

    @property
    def num_arrived(self) -> int:
        return len(self.calls)

    @property
    def num_finished(self) -> int:
        return sum(call.end == FINISHED for call in self.calls)

    @property
    def num_cancelled(self) -> int:
        return sum(call.end == CANCELLED for call in self.calls)

    @property
    def rejected(self) -> dict[str, int]:
        """Refused requests by the code of the error."""
        found: dict[str, int] = {}
        for call in self.calls:
            if call.end not in (FINISHED, CANCELLED):
                found[call.end] = found.get(call.end, 0) + 1
        return found

    @property
    def ttft_s(self) -> list[Seconds]:
        return [call.first_at - call.arrival.at for call in self.calls if call.first_at is not None]

    @property
    def tpot_s(self) -> list[Seconds]:
        return [pace for call in self.calls if (pace := call.tpot_s) is not None]

    @property
    def e2e_s(self) -> list[Seconds]:
        return [call.ended_at - call.arrival.at for call in self.calls if call.end == FINISHED]

    @property
    def served(self) -> dict[TenantId, int]:
        """Weighted tokens per tenant. Source: [vtc] input + 2 × output."""
        found: dict[TenantId, int] = {}
        for call in self.calls:
            if call.end == FINISHED:
                arrival = call.arrival
                service = arrival.num_prompt_tokens + 2 * arrival.num_output_tokens
                found[arrival.tenant] = found.get(arrival.tenant, 0) + service
        return found

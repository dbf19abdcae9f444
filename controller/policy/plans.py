"""What is planned: groups on slots. Frozen words, small enough to cross to the solver's process."""

from dataclasses import dataclass

from nearline.protocol import Seconds


@dataclass(frozen=True, slots=True)
class PlanGroup:
    """Waiting requests that are served together: `due_s` from now (negative: late already), `work_s` on a slot."""

    model: str
    work_s: Seconds
    due_s: Seconds
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class PlanSlot:
    """What a slot holds now, when it is free, and how long each other model takes to come up in it."""

    loaded: str | None
    swap_s: dict[str, Seconds]
    free_s: Seconds = 0.0


Plan = tuple[tuple[int, ...], ...]
"""For each slot the indices of its groups, in order."""

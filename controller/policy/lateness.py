"""What is late already lets those go first that can still be in time, for a bounded while. Pure.

By due date alone one burst makes everybody late: each request is served just after its due date, and so is the next.
A request that would miss its target even if it were sent now has little to lose, so it is due a second time,
`SECOND_TARGETS` targets after its arrival, and only those due before that go before it: nobody is put off for ever.
Source: [moore] the job that makes another one late is put last; the second date, which bounds the wait, is ours.
"""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from nearline.controller.policy.prediction import Waiting, shortest_first
from nearline.protocol import Seconds

SECOND_TARGETS = 3.0
"""A late request is due again when it has waited this many targets; longer waits are refused at arrival."""
MAX_LEAD = 0.5
"""A lead is at most this part of the target: where places come free that seldom, somebody is made to give way."""


class Due(Waiting, Protocol):
    """A waiting request with the date it goes by now: its due date, or the second one if it is late."""

    @property
    def is_late(self) -> bool: ...
    @property
    def next_due_at(self) -> Seconds: ...


D = TypeVar("D", bound=Due)


def late_from(due_at: Seconds, target: Seconds) -> Seconds:
    """Say from when on a request may count as late."""
    return due_at - MAX_LEAD * target


def is_too_late(due_at: Seconds, target: Seconds, lead_s: Seconds, now: Seconds) -> bool:
    """Whether a request would miss its target though it were sent as the next one, which takes `lead_s`."""
    return now > due_at - min(lead_s, MAX_LEAD * target)


def in_turn(heads: Iterable[D], now: Seconds) -> list[D]:
    """Order one tenant's requests: who can be in time shortest first, behind those late ones that are due before."""
    on_time, late = list[D](), list[D]()
    for head in heads:
        (late if head.is_late else on_time).append(head)
    if not late:
        return shortest_first(on_time, now)
    late.sort(key=lambda head: (head.next_due_at, head.order))
    first_due_at = min((head.next_due_at for head in on_time), default=float("inf"))
    before = [head for head in late if head.next_due_at <= first_due_at]
    return [*before, *shortest_first(on_time, now), *late[len(before) :]]

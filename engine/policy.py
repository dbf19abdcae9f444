"""In which order sequences run, and who gives up a place for whom: one interface, first come first served. Pure.

A policy never cuts a prompt short: only a sequence that has generated since it got its place may lose it, so each
place given is worth at least one token.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

from nearline.engine.sequence import Sequence
from nearline.engine.types import BatchItem
from nearline.protocol import Seconds


class Policy(Protocol):
    """Keeps whatever it needs of live sequences between `join` and `leave`."""

    def join(self, sequence: Sequence) -> None:
        """Meet a new sequence."""

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""

    def charge(self, items: Seq[BatchItem], seconds: Seconds, now: Seconds) -> None:
        """Take note of a step that is about to run and of the time it is predicted to take."""

    def in_order(self, sequences: list[Sequence], now: Seconds) -> list[Sequence]:
        """Order sequences that came in order of arrival; who stands first is served first and preempted last."""

    def yielding(self, running: Seq[Sequence], to: Sequence) -> list[Sequence]:
        """List the running sequences that would give their places to one that waits, the first to go first."""


class FirstCome:
    """By (priority, arrival), which is how the scheduler keeps its lists. Nobody ever yields.

    Bound: a sequence waits for those before it and for nobody else.
    """

    def join(self, sequence: Sequence) -> None: ...

    def leave(self, sequence: Sequence) -> None: ...

    def charge(self, items: Seq[BatchItem], seconds: Seconds, now: Seconds) -> None: ...

    def in_order(self, sequences: list[Sequence], now: Seconds) -> list[Sequence]:
        return sequences

    def yielding(self, running: Seq[Sequence], to: Sequence) -> list[Sequence]:
        return []

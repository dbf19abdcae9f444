"""Shortest predicted answer first, with a bound on how long anybody is overtaken. Pure.

Source: SSJF (2024): predicted output length orders the queue. Its guard against starvation (100 s, or ten times the
own length) is replaced by one bound that is the same for all.
"""

from collections.abc import Sequence as Seq

from nearline.engine.sequence import Sequence
from nearline.engine.types import BatchItem
from nearline.protocol import Seconds


class ShortestFirst:
    """By (priority, predicted tokens still to come, arrival); nobody yields.

    Bound: whoever has waited `wait_bound_s` stands, in order of arrival, before all of its priority who have not; so
    it waits at most that long and then for those who came earlier.
    """

    def __init__(self, wait_bound_s: Seconds) -> None:
        self._wait_bound_s = wait_bound_s

    def join(self, sequence: Sequence) -> None: ...

    def leave(self, sequence: Sequence) -> None: ...

    def charge(self, items: Seq[BatchItem], seconds: Seconds, now: Seconds) -> None: ...

    def in_order(self, sequences: list[Sequence], now: Seconds) -> list[Sequence]:
        def rank(sequence: Sequence) -> tuple[int, bool, float, Seconds, int]:
            is_patient = now < sequence.arrived_at + self._wait_bound_s
            length = sequence.predicted_left if is_patient else 0.0
            return sequence.request.priority, is_patient, length, sequence.arrived_at, sequence.serial

        return sorted(sequences, key=rank)

    def yielding(self, running: Seq[Sequence], to: Sequence) -> list[Sequence]:
        return []

"""Skip-join multi-level feedback queue: short answers overtake long ones without anybody knowing lengths. Pure.

Level p holds those who may run for q·2^p before they step down. A newcomer joins at the first level whose quantum its
prefill fits in, so that no prefill is cut by stepping down. Who is not served for `promote_after_s` goes to the top,
with the quantum in which it can be prefilled again, and steps down below the level of that quantum.
Source: FastServe (2023); the paper's idea, our own rules for places and progress.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from nearline.engine.sequence import Sequence
from nearline.engine.types import BatchItem
from nearline.protocol import Seconds

QUANTUM_S: Seconds = 0.01
PROMOTE_AFTER_S: Seconds = 3.0
_MAX_LEVEL = 30


@dataclass(slots=True)
class _Standing:
    level: int
    quantum_level: int
    position: int
    served_s: Seconds
    last_served_at: Seconds


class FeedbackQueue:
    """By (priority, level, place in the level). Who waits takes the place of one who decodes at a worse level.

    Bound: with at most K live sequences of its priority or better, a sequence is served again after at most
    `promote_after_s` and the time in which those already at the top (fewer than K) spend their quanta there.
    """

    def __init__(
        self,
        prefill_s: Callable[[int], Seconds],
        quantum_s: Seconds = QUANTUM_S,
        promote_after_s: Seconds | None = PROMOTE_AFTER_S,
    ) -> None:
        """`prefill_s` predicts the prefill of so many tokens. `promote_after_s` None: nobody is ever promoted."""
        self._prefill_s = prefill_s
        self._quantum_s = quantum_s
        self._promote_after_s = promote_after_s
        self._standings: dict[int, _Standing] = {}
        self._last, self._first = 0, 0

    def level(self, sequence: Sequence) -> int:
        return self._standings[sequence.serial].level

    def join(self, sequence: Sequence) -> None:
        self._last += 1
        level = self._prefill_level(sequence)
        self._standings[sequence.serial] = _Standing(level, level, self._last, 0.0, sequence.arrived_at)

    def leave(self, sequence: Sequence) -> None:
        del self._standings[sequence.serial]

    def quantum_s(self, level: int) -> Seconds:
        return self._quantum_s * float(1 << level)

    def charge(self, items: Seq[BatchItem], seconds: Seconds, now: Seconds) -> None:
        for item in items:
            standing = self._standings[item.sequence.serial]
            standing.served_s += seconds
            standing.last_served_at = now
            if item.is_sampled and standing.served_s > self.quantum_s(standing.quantum_level):
                self._first -= 1
                standing.level = standing.quantum_level = min(standing.quantum_level + 1, _MAX_LEVEL)
                standing.position, standing.served_s = self._first, 0.0

    def in_order(self, sequences: list[Sequence], now: Seconds) -> list[Sequence]:
        if self._promote_after_s is not None:
            for sequence in sequences:
                standing = self._standings[sequence.serial]
                if standing.level and now - standing.last_served_at >= self._promote_after_s:
                    self._last += 1
                    standing.level, standing.quantum_level = 0, self._prefill_level(sequence)
                    standing.position, standing.served_s = self._last, 0.0
        return sorted(sequences, key=self._rank)

    def yielding(self, running: Seq[Sequence], to: Sequence) -> list[Sequence]:
        best = self._rank(to)[:2]
        worse = [s for s in running if s.num_uncomputed == 1 and self._rank(s)[:2] > best]
        return sorted(worse, key=self._rank, reverse=True)

    def _prefill_level(self, sequence: Sequence) -> int:
        prefill_s, level = self._prefill_s(len(sequence.token_ids)), 0
        while self.quantum_s(level) < prefill_s and level < _MAX_LEVEL:
            level += 1
        return level

    def _rank(self, sequence: Sequence) -> tuple[int, int, int]:
        standing = self._standings[sequence.serial]
        return sequence.request.priority, standing.level, standing.position

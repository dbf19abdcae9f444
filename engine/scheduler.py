"""Which sequences compute how many tokens in the next step. Pure.

Source: Sarathi-Serve (OSDI 2024): one token for every decoding sequence first, the rest of a token budget for
prompts, cut into chunks, so that a long prompt never stalls the others. We differ in admission (see admission.py)
and in preempting the last in order of (priority, arrival), not the last admitted: the first always gets ahead.
"""

import sys
from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from nearline.engine.adapters import AdapterTable
from nearline.engine.admission import Growth, peak_blocks
from nearline.engine.block_manager import BlockCopy, BlockManager
from nearline.engine.config import EngineConfig
from nearline.engine.sequence import Order, Sequence, SequenceState
from nearline.engine.types import Batch, BatchItem
from nearline.protocol import Seconds


@dataclass(slots=True)
class _Step:
    """The step being put together. `tokens_left` of the budget are not given out yet."""

    tokens_left: int
    items: list[BatchItem] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    num_preempted: int = 0

    def add(self, sequence: Sequence, num_tokens: int, copies: list[BlockCopy]) -> None:
        is_sampled = num_tokens == sequence.num_uncomputed
        self.items.append(BatchItem(sequence, sequence.num_computed, num_tokens, is_sampled))
        self.copies += copies


class Scheduler:
    """Keeps the waiting and the running sequences, both in order."""

    def __init__(self, config: EngineConfig, blocks: BlockManager, adapters: AdapterTable) -> None:
        self._config = config
        self._blocks = blocks
        self._adapters = adapters
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def waiting(self) -> Seq[Sequence]:
        return self._waiting

    @property
    def running(self) -> Seq[Sequence]:
        return self._running

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.state = SequenceState.WAITING
        insort(self._waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence that ends out of its list and free its blocks."""
        (self._running if sequence.state is SequenceState.RUNNING else self._waiting).remove(sequence)
        self._blocks.release(sequence)
        sequence.state = SequenceState.FINISHED

    def schedule(self, now: Seconds) -> Batch | None:
        """Put the next step together, or return None if nothing can run.

        1. Every decoding sequence gets its one token; they are never cut by the budget.
        2. Running sequences in prefill share the rest of the budget, in order.
        3. All of these get their blocks, in order; when blocks lack, the last running sequence is preempted.
        4. Waiting sequences are admitted, in order, until one does not fit. One whose adapter is not there yet is
           passed over. After a preemption nobody is admitted.
        """
        step = _Step(self._config.max_step_tokens or sys.maxsize)
        shares = self._share_budget(step)
        self._place(step, shares)
        if not step.num_preempted:
            self._admit(step, now)
        return Batch(tuple(step.items), tuple(step.copies)) if step.items else None

    def _share_budget(self, step: _Step) -> dict[int, int]:
        """Decide tokens per running sequence, by serial number."""
        shares = {s.serial: 1 for s in self._running if s.num_uncomputed == 1}
        step.tokens_left = max(0, step.tokens_left - len(shares))
        for sequence in self._running:
            if sequence.serial not in shares:
                shares[sequence.serial] = min(sequence.num_uncomputed, step.tokens_left)
                step.tokens_left -= shares[sequence.serial]
        return shares

    def _place(self, step: _Step, shares: dict[int, int]) -> None:
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            index += 1
            num_tokens = shares[sequence.serial]
            if num_tokens == 0:
                continue
            copies = self._blocks.extend(sequence, num_tokens)
            while copies is None and self._running[-1] is not sequence:
                self._preempt(self._running[-1], step)
                copies = self._blocks.extend(sequence, num_tokens)
            if copies is None:
                self._preempt(sequence, step)
            else:
                step.add(sequence, num_tokens, copies)

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        """Give up a sequence's blocks; it will compute its prompt and what it generated again."""
        self._running.remove(sequence)
        self._blocks.release(sequence)
        self.add(sequence)
        step.num_preempted += 1
        self.num_preemptions += 1

    def _admit(self, step: _Step, now: Seconds) -> None:
        admitted: list[Sequence] = []
        for sequence in self._waiting:
            if step.tokens_left == 0 or len(self._running) + len(admitted) >= self._config.max_running:
                break
            if not self._adapters.can_start(sequence):
                continue
            if not self._start(sequence, step):
                break
            self._adapters.pin(sequence, now)
            if sequence.first_scheduled_at is None:
                sequence.first_scheduled_at = now
            admitted.append(sequence)
        if admitted:
            self._waiting = [s for s in self._waiting if s.state is SequenceState.WAITING]
            self._running = sorted([*self._running, *admitted], key=_order)

    def _start(self, sequence: Sequence, step: _Step) -> bool:
        """Give a waiting sequence blocks and its first chunk. False, with nothing changed, if it does not fit."""
        self._blocks.adopt_prefix(sequence)
        num_tokens = min(sequence.num_uncomputed, step.tokens_left)
        claims = [self._claim(s, n) for s, n in self._planned(step)] + [self._claim(sequence, num_tokens)]
        peak = peak_blocks(claims, self._blocks.num_shared, self._blocks.block_size)
        copies = self._blocks.extend(sequence, num_tokens) if peak <= self._blocks.num_blocks else None
        if copies is None:
            self._blocks.release(sequence)
            return False
        self._blocks.count_hit(sequence)
        if sequence.first_scheduled_at is None:
            sequence.num_cached = sequence.num_computed
        step.add(sequence, num_tokens, copies)
        step.tokens_left -= num_tokens
        sequence.state = SequenceState.RUNNING
        return True

    def _planned(self, step: _Step) -> list[tuple[Sequence, int]]:
        """List running sequences, those just admitted too, with their tokens of this step."""
        planned = [(item.sequence, item.num_tokens) for item in step.items]
        if len(planned) < len(self._running):
            served = {sequence.serial for sequence, _ in planned}
            planned += [(s, 0) for s in self._running if s.serial not in served]
        return planned

    def _claim(self, sequence: Sequence, num_tokens: int) -> Growth:
        num_positions = len(sequence.token_ids)
        growth = sequence.max_positions - num_positions
        share = self._config.future_share
        return Growth(
            num_positions=num_positions,
            max_positions=num_positions + (growth if share == 1.0 else int(share * growth)),
            num_shared=self._blocks.num_settled_shared(sequence),
            is_decoding=num_tokens == sequence.num_uncomputed,
        )


def _order(sequence: Sequence) -> Order:
    return sequence.order

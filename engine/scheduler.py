"""Which sequences compute how many tokens in the next step. Pure.

Source: Sarathi-Serve (OSDI 2024): one token for every decoding sequence first, the rest of a budget for prompts, cut
into chunks, so that a long prompt never stalls the others (step_budget.py). We differ in admission (see admission.py)
and in preempting the last in the policy's order, not the last admitted: the first always gets ahead.
"""

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from nearline.engine.adapters import AdapterTable
from nearline.engine.admission import Growth, peak_blocks
from nearline.engine.block_manager import BlockCopy, BlockManager
from nearline.engine.config import EngineConfig, MergeMode
from nearline.engine.policy import Policy
from nearline.engine.sequence import Order, Sequence, SequenceState
from nearline.engine.step_budget import StepBudget, tpot_target_s
from nearline.engine.step_pace import StepPace
from nearline.engine.swap import BlockMove, HostArea
from nearline.engine.types import Batch, BatchItem
from nearline.protocol import Seconds, StepWork


@dataclass(slots=True)
class _Step:
    """The step being put together, and who lost a place to a better-placed one while it was."""

    budget: StepBudget
    items: list[BatchItem] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    swap_outs: list[BlockMove] = field(default_factory=list)
    swap_ins: list[BlockMove] = field(default_factory=list)
    displaced: list[Sequence] = field(default_factory=list)
    num_preempted: int = 0

    def add(self, sequence: Sequence, num_tokens: int, copies: list[BlockCopy]) -> None:
        is_sampled = num_tokens == sequence.num_uncomputed
        self.items.append(BatchItem(sequence, sequence.num_computed, num_tokens, is_sampled))
        self.copies += copies

    def batch(self) -> Batch | None:
        if not self.items:
            return None
        return Batch(tuple(self.items), tuple(self.copies), tuple(self.swap_outs), tuple(self.swap_ins))


class Scheduler:
    """Keeps the waiting and the running sequences."""

    def __init__(
        self, config: EngineConfig, blocks: BlockManager, adapters: AdapterTable, policy: Policy, pace: StepPace
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._adapters = adapters
        self._policy = policy
        self._pace = pace
        self.host = HostArea(config)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._paused: list[Sequence] = []
        self._unmade: list[BlockMove] = []
        """Moves to the host from before a step in which nobody could run: the next one makes them."""
        self.num_preemptions = 0
        """Places lost because blocks lacked."""
        self.num_displaced = 0
        """Places lost because the policy gave them to others."""
        self.is_short = False
        """Whether somebody waits because blocks lack."""

    @property
    def waiting(self) -> Seq[Sequence]:
        return self._waiting

    @property
    def running(self) -> Seq[Sequence]:
        return self._running

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._policy.join(sequence)
        self._queue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence that ends out of its list and free its blocks."""
        (self._running if sequence.state is SequenceState.RUNNING else self._waiting).remove(sequence)
        self._blocks.release(sequence)
        self._unmade = [move for move in self._unmade if move[1] not in sequence.host_table]
        self.host.drop(sequence)
        self._policy.leave(sequence)
        sequence.state = SequenceState.FINISHED

    def forget_moves(self, batch: Batch) -> None:
        """Take in that a step failed, so that its moves to the host may not have been made: who gave its blocks up
        for them computes again."""
        hosts = [host for _, host in batch.swap_outs]
        for sequence in self._waiting:
            if any(host in hosts for host in sequence.host_table):
                self.host.drop(sequence)

    @property
    def num_spare(self) -> int:
        """Blocks that no running sequence will ever need."""
        claims = [self._claim(sequence, 0) for sequence in self._running]
        return self._blocks.num_usable - peak_blocks(claims, self._blocks.num_shared, self._blocks.block_size)

    def schedule(self, now: Seconds, may_run: Callable[[Sequence], bool] | None = None) -> Batch | None:
        """Put the next step together, or return None if nothing can run. `may_run`: who else must pause, if anybody.

        1. Where the policy says so, or they were told to, running sequences give their places to waiting ones.
        2. Every decoding sequence gets its one token; they are never cut by the budget.
        3. Running sequences in prefill share the rest of the budget, in order.
        4. All of these get their blocks, in order; when blocks lack, the last running sequence is preempted.
        5. Waiting sequences are admitted, in order, until one does not fit. One whose adapter is not there yet is
           passed over. After a preemption nobody is admitted.
        """
        self.is_short = False
        self._running = self._policy.in_order(self._running, now)
        self._waiting = self._policy.in_order(self._waiting, now)
        self._paused = [] if may_run is None else [s for s in (*self._running, *self._waiting) if not may_run(s)]
        displaced = self._displaced()
        decoding = [s for s in self._running if s.num_uncomputed == 1 and s not in displaced and s not in self._paused]
        work = StepWork(0, 0, len(decoding), sum(len(s.token_ids) for s in decoding))
        target_s = tpot_target_s(decoding, self._config)
        step = _Step(StepBudget(self._config, self._pace, target_s, work), displaced=displaced, swap_outs=self._unmade)
        for sequence in displaced:
            self._preempt(sequence, step)
        self.num_displaced += len(displaced)
        self._place(step, self._share_budget(step))
        if not step.num_preempted:
            self._admit(step, now)
        self._policy.charge(step.items, self._pace.model.step_s(step.budget.work), now)
        batch = step.batch()
        self._unmade = step.swap_outs if batch is None else []
        return batch

    def _displaced(self) -> list[Sequence]:
        """Choose who must yield so that those who wait before them have places and blocks."""
        displaced: list[Sequence] = []
        entering: list[Sequence] = []
        for sequence in self._waiting:
            if sequence in self._paused or not self._adapters.can_start(sequence):
                continue
            staying = [s for s in self._running if s not in displaced]
            told = [s for s in reversed(staying) if s.must_yield and _order(sequence) < _order(s)]
            candidates = told or self._policy.yielding(staying, sequence)
            if not candidates:
                break
            count = next(
                (n for n in range(len(candidates) + 1) if self._fits(sequence, staying, candidates[:n], entering)), None
            )
            if count is None:
                break
            displaced += candidates[:count]
            entering.append(sequence)
        return displaced

    def _fits(
        self, sequence: Sequence, staying: list[Sequence], without: list[Sequence], entering: list[Sequence]
    ) -> bool:
        """Whether a sequence has a place and blocks, beside those who stay and enter, once some have gone."""
        rest = [s for s in staying if s not in without]
        if len(rest) + len(entering) >= self._config.max_running:
            return False
        claims = [self._claim(s, 1) for s in rest] + [self._claim(s, 0) for s in (*entering, sequence)]
        return peak_blocks(claims, self._blocks.num_shared, self._blocks.block_size) <= self._blocks.num_usable

    def _share_budget(self, step: _Step) -> dict[int, int]:
        """Decide tokens per running sequence, by serial number."""
        shares = {s.serial: 0 for s in self._paused}
        shares |= {s.serial: 1 for s in self._running if s.num_uncomputed == 1 and s.serial not in shares}
        for sequence in self._running:
            if sequence.serial not in shares:
                shares[sequence.serial] = step.budget.chunk(sequence.num_uncomputed, sequence.num_computed)
                step.budget.take(shares[sequence.serial], sequence.num_computed)
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
                self._preempt_short(self._running[-1], step)
                copies = self._blocks.extend(sequence, num_tokens)
            if copies is None:
                self._preempt_short(sequence, step)
            else:
                step.add(sequence, num_tokens, copies)

    def _preempt_short(self, sequence: Sequence, step: _Step) -> None:
        self._preempt(sequence, step)
        step.num_preempted += 1
        self.num_preemptions += 1

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        """Take a sequence's blocks. Their content moves to the host or is computed again, whichever is quicker."""
        self._running.remove(sequence)
        if self.host.pays(sequence, self._pace.model):
            step.swap_outs += self.host.swap_out(sequence, self._blocks)
        else:
            self._blocks.release(sequence)
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        insort(self._waiting, sequence, key=_order)

    def _admit(self, step: _Step, now: Seconds) -> None:
        admitted: list[Sequence] = []
        for sequence in self._waiting:
            if len(self._running) + len(admitted) >= self._config.max_running:
                break
            if sequence in step.displaced or sequence in self._paused or not self._adapters.can_start(sequence):
                continue
            if not self._start(sequence, step):
                break
            self._adapters.pin(sequence)
            if sequence.first_scheduled_at is None:
                sequence.first_scheduled_at = now
            admitted.append(sequence)
        if admitted:
            self._waiting = [s for s in self._waiting if s.state is SequenceState.WAITING]
            self._running = sorted([*self._running, *admitted], key=_order)

    def _start(self, sequence: Sequence, step: _Step) -> bool:
        """Give a waiting sequence blocks and its first chunk. False, with nothing changed, if it does not fit."""
        self._blocks.adopt_prefix(sequence)
        num_restored = max(0, sequence.num_swapped - sequence.num_computed)
        start = sequence.num_computed + num_restored
        num_tokens = step.budget.chunk(len(sequence.token_ids) - start, start)
        claims = [self._claim(s, n) for s, n in self._planned(step)]
        claims.append(self._claim(sequence, num_restored + num_tokens))
        peak = peak_blocks(claims, self._blocks.num_shared, self._blocks.block_size)
        has_room = num_tokens > 0 and peak <= self._blocks.num_usable
        self.is_short = num_tokens > 0 and not has_room
        copies = self._blocks.extend(sequence, num_restored + num_tokens) if has_room else None
        if copies is None:
            self._blocks.release(sequence)
            return False
        if not sequence.num_swapped:
            self._blocks.count_hit(sequence)
        if sequence.first_scheduled_at is None:
            sequence.num_cached = sequence.num_computed
        step.swap_ins += self.host.swap_in(sequence)
        step.add(sequence, num_tokens, copies)
        step.budget.take(num_tokens, start)
        sequence.state, sequence.must_yield = SequenceState.RUNNING, False
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
            # Who pauses while it is others' turn does not grow in step with them.
            is_decoding=num_tokens == sequence.num_uncomputed and self._config.merge is not MergeMode.ALWAYS,
        )


def _order(sequence: Sequence) -> Order:
    return sequence.order

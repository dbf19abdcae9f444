"""Engines in virtual time: what an instance does with its sequences once its bytes are there.

`PacedEngine` fixes a sequence's pace when it begins: two events per sequence, for large fleets. stepped.py runs the
engine's own scheduler step by step, for what depends on how batches are put together.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from nearline.controller.events import Event, FirstToken, SequenceEnded
from nearline.protocol import FinishReason, RequestId, Seconds, Slo, StepTimeModel, TenantId
from nearline.simulator.cost_model import CostModel

Schedule = Callable[..., None]
"""schedule(delay_s, function, *arguments)"""
Post = Callable[[Event], None]


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """One attempt of a request, and how many tokens it has when this attempt ends or is looked at."""

    request_id: RequestId
    attempt: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_generated: int = 0
    prefix_hash: int = 0
    tenant: TenantId = TenantId("default")
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    order: int = 0
    must_yield: bool = False
    begun_at: Seconds = 0.0
    token_s: Seconds = 1.0


@dataclass(slots=True)
class EnginePorts:
    """What an engine needs of its world: time, the node's cores, and where to say what happened.

    `compute` is `schedule` for what takes longer while others compute; `emptied` follows every end."""

    clock: Callable[[], Seconds]
    schedule: Schedule
    compute: Schedule
    post: Post
    emptied: Callable[[], None]


class SimulatedEngine(Protocol):
    """Sequences may come before `open`; they run after it."""

    @property
    def num_sequences(self) -> int: ...
    def open(self) -> None:
        """The bytes are there."""

    def submit(self, sequence: SimulatedSequence) -> None: ...
    def abort(self, request_id: RequestId) -> None: ...
    def num_generated(self, request_id: RequestId) -> int | None:
        """Tokens a sequence has by now, those of earlier attempts included; None if it is not here."""

    def yield_place(self, request_id: RequestId) -> None:
        """Let a running sequence go back behind whoever comes before it."""

    def clear(self) -> list[SimulatedSequence]:
        """Stop everything and give back what was there, with the tokens that were generated."""


class PacedEngine:
    """At most `max_running` at once, by (priority, arrival); a pace per sequence, by the batch that it joins."""

    def __init__(self, ports: EnginePorts, cost: CostModel, steps: StepTimeModel) -> None:
        self._ports, self._steps, self._cost = ports, steps, cost
        self._is_open = False
        self._running: dict[RequestId, SimulatedSequence] = {}
        self._waiting: list[SimulatedSequence] = []
        self._num_yielding = self._num_submitted = 0

    @property
    def num_sequences(self) -> int:
        return len(self._running) + len(self._waiting)

    def open(self) -> None:
        self._is_open = True
        self._fill()

    def submit(self, sequence: SimulatedSequence) -> None:
        self._num_submitted += 1
        sequence.order = self._num_submitted
        if self._is_open and len(self._running) < self._cost.max_running:
            self._run(sequence)
        else:
            insort(self._waiting, sequence, key=_rank)
            if self._num_yielding:
                self._give_way()

    def yield_place(self, request_id: RequestId) -> None:
        sequence = self._running.get(request_id)
        if sequence is not None and not sequence.must_yield:
            sequence.must_yield = True
            self._num_yielding += 1
            self._give_way()

    def abort(self, request_id: RequestId) -> None:
        self._waiting = [each for each in self._waiting if each.request_id != request_id]
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._leave(sequence)
            self._fill()
        if not self._running and not self._waiting:
            self._ports.emptied()

    def clear(self) -> list[SimulatedSequence]:
        found = [*(self._stopped(sequence) for sequence in list(self._running.values())), *self._waiting]
        self._waiting = []
        return found

    def _leave(self, sequence: SimulatedSequence) -> None:
        del self._running[sequence.request_id]
        self._num_yielding -= sequence.must_yield

    def num_generated(self, request_id: RequestId) -> int | None:
        running = self._running.get(request_id)
        if running is not None:
            return self._done(running)
        return next((each.num_generated for each in self._waiting if each.request_id == request_id), None)

    def _done(self, sequence: SimulatedSequence) -> int:
        now, rest = self._ports.clock(), sequence.num_output_tokens - sequence.num_generated - 1
        passed = 1 + int((now - sequence.begun_at) / sequence.token_s) if now > sequence.begun_at else 0
        return sequence.num_generated + max(0, min(passed, rest))

    def _stopped(self, sequence: SimulatedSequence) -> SimulatedSequence:
        """Take a running sequence out; what comes back has its tokens, and hears nothing of events still to come."""
        self._leave(sequence)
        return replace(sequence, num_generated=self._done(sequence), must_yield=False)

    def _give_way(self) -> None:
        """Exchange those who were told to yield for whoever waits before them."""
        for sequence in [each for each in self._running.values() if each.must_yield]:
            if self._waiting and _rank(self._waiting[0]) < _rank(sequence):
                insort(self._waiting, self._stopped(sequence), key=_rank)
                self._run(self._waiting.pop(0))

    def _run(self, sequence: SimulatedSequence) -> None:
        self._running[sequence.request_id] = sequence
        steps, num_running, overhead_s = self._steps, len(self._running), self._cost.step_overhead_s
        known = sequence.num_prompt_tokens + sequence.num_generated
        rest = sequence.num_output_tokens - sequence.num_generated - 1
        square = steps.prefill_per_square_s * known
        prefill_s = steps.prefill_base_s + (steps.prefill_per_token_s + square) * known + overhead_s
        per_sequence_s = steps.decode_per_sequence_s + steps.decode_per_context_s * (known + rest * 0.5)
        sequence.token_s = steps.decode_base_s + per_sequence_s * num_running + overhead_s
        sequence.begun_at = self._ports.clock() + prefill_s
        self._ports.schedule(prefill_s, self._first_token, sequence)
        self._ports.schedule(prefill_s + sequence.token_s * (rest if rest > 0 else 0), self._finished, sequence)

    def _first_token(self, sequence: SimulatedSequence) -> None:
        if self._running.get(sequence.request_id) is sequence:
            self._ports.post(FirstToken(sequence.request_id, sequence.attempt))

    def _finished(self, sequence: SimulatedSequence) -> None:
        if self._running.get(sequence.request_id) is not sequence:
            return
        self._leave(sequence)
        num_tokens = sequence.num_output_tokens
        self._ports.post(SequenceEnded(sequence.request_id, sequence.attempt, FinishReason.STOP, num_tokens))
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._cost.max_running:
            self._run(self._waiting.pop(0))
        if not self._running and not self._waiting:
            self._ports.emptied()


def _rank(sequence: SimulatedSequence) -> tuple[int, int]:
    return (sequence.priority, sequence.order)

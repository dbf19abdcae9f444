"""Which steps a profile measures, in which order, and what follows from their times. Pure.

All steps are measured in each of several rounds, so that what disturbs the machine for a second (a process that warms
up) disturbs one measurement of some steps, not all of a few. Small steps come first. A step that is believed to take
longer than LONGEST_STEP_S is left out, because a request that arrives meanwhile waits for it, unless there would be too
few to fit a law to.
"""

from dataclasses import dataclass
from statistics import median

from nearline.engine.step_pace import StepPace, fit_model
from nearline.protocol import Bytes, Seconds, StepTimeModel, StepWork

LONGEST_STEP_S: Seconds = 1.0
LONGEST_PROFILE_S: Seconds = 30.0
NUM_REPEATS = 3
_MOST_POSITIONS = 16384
"""Positions of the KV cache that a step may touch at most: memory, once written, stays taken."""
_FEWEST_SHAPES = 4
_PREFILLS = (
    ((16, 0),), ((32, 0),), ((48, 0),), ((64, 0),), ((32, 0),) * 4, ((128, 0),), ((256, 0),), ((64, 0),) * 4,
    ((128, 512),), ((512, 0),), ((128, 0),) * 4, ((256, 1024),), ((512, 512),), ((512, 1536),),
)  # fmt: skip
_BATCHES, _CONTEXTS = (1, 2, 4, 8, 16, 32, 64), (32, 256, 1024, 2048)

Chunk = tuple[int, int]
"""(tokens, known ones before them)."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step to be measured: chunks of prompts, or one token of each of several sequences."""

    chunks: tuple[Chunk, ...]
    is_decode: bool

    @property
    def work(self) -> StepWork:
        work = StepWork()
        for num_tokens, start in self.chunks:
            work = work.and_decode(start + 1) if self.is_decode else work.and_prefill(num_tokens, start)
        return work


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """What steps may be: positions of one sequence, of all, tokens of a step, sequences."""

    max_context_tokens: int
    kv_tokens: int
    max_step_tokens: int
    max_running: int

    def allow(self, shape: StepShape) -> bool:
        ends = [start + num_tokens for num_tokens, start in shape.chunks]
        num_tokens = sum(num_tokens for num_tokens, _ in shape.chunks)
        is_one_step = len(ends) <= self.max_running and num_tokens <= self.max_step_tokens
        return (
            is_one_step and max(ends) <= self.max_context_tokens and sum(ends) <= min(self.kv_tokens, _MOST_POSITIONS)
        )


class ProfilePlan:
    """The steps still to come and the times of those measured: `next`, run it, `observe`, until None."""

    def __init__(self, num_bytes: Bytes, limits: ProfileLimits) -> None:
        shapes = [StepShape(chunks, False) for chunks in _PREFILLS]
        decodes = [StepShape(((1, c - 1),) * n, True) for c in _CONTEXTS for n in _BATCHES]
        shapes += sorted(decodes, key=lambda shape: (shape.work.num_context_tokens, shape.work.num_decoding))
        self._shapes = [shape for shape in shapes if limits.allow(shape)]
        self._pace = StepPace(StepTimeModel.guess(num_bytes), is_profiled=False)
        self._times: list[list[Seconds]] = [[] for _ in self._shapes]
        self._at = 0
        self._spent_s = 0.0

    @property
    def num_total(self) -> int:
        return NUM_REPEATS * len(self._shapes)

    @property
    def num_done(self) -> int:
        return self._at

    def next(self) -> StepShape | None:
        """Return the step to measure now, or None when all have been."""
        while self._at < self.num_total and self._is_skipped():
            self._at += 1
        return self._shapes[self._index] if self._at < self.num_total else None

    def observe(self, seconds: Seconds) -> None:
        """Take in how long the step took; each is measured a few times."""
        self._pace.observe(self._shapes[self._index].work, seconds)
        self._spent_s += seconds
        self._times[self._index].append(seconds)
        self._at += 1

    def result(self) -> tuple[StepTimeModel, float, float, int]:
        """Return the model, the mean relative errors of prefill and decode, and the number of steps it is fitted to."""
        measured = [(s.work, median(times)) for s, times in zip(self._shapes, self._times, strict=True) if times]
        return *fit_model(measured), len(measured)

    @property
    def _index(self) -> int:
        return self._at % len(self._shapes)

    def _is_skipped(self) -> bool:
        if self._at < len(self._shapes):
            return self._is_left_out(self._shapes[self._index])
        return not self._times[self._index] or self._spent_s > LONGEST_PROFILE_S

    def _is_left_out(self, shape: StepShape) -> bool:
        pairs = zip(self._shapes, self._times, strict=True)
        num_alike = sum(bool(times) and other.is_decode == shape.is_decode for other, times in pairs)
        is_slow = self._spent_s > LONGEST_PROFILE_S or self._pace.model.step_s(shape.work) > LONGEST_STEP_S
        return is_slow and num_alike >= _FEWEST_SHAPES

"""How many prompt tokens a step may take beside its decodes, so that no stream waits longer than was promised. Pure.

Source: Sarathi-Serve (OSDI 2024): the largest chunk whose predicted step time meets the target between tokens. What a
target cannot hold is said here: a step whose decodes alone take as long gives prompts half as much again, and never
less than MIN_CHUNK tokens, so prompts advance whatever the targets are.
"""

import sys
from collections.abc import Iterable
from math import inf

from nearline.engine.config import EngineConfig
from nearline.engine.sequence import Sequence
from nearline.engine.step_pace import StepPace
from nearline.protocol import Seconds, SloClass, StepWork

MIN_CHUNK = 16
"""Prompt tokens that every step with a prompt takes at least."""
LONGEST_FREE_STEP_S: Seconds = 1.0
"""A step in which nobody decodes: who arrives meanwhile waits for its end. Not before a step has been measured: the
first prompt of a cold start is not cut on a guess."""
_STRETCH = 1.5
"""A step with prompts may take this many times as long as its decodes alone, if that is more than the target."""


def tpot_target_s(decoding: Iterable[Sequence], config: EngineConfig) -> Seconds | None:
    """The strictest target between tokens of those who decode; None if nobody does."""
    return min((_target_s(sequence, config) for sequence in decoding), default=None)


class StepBudget:
    """What one step may still take. Chunks are whole blocks unless a prompt ends in them."""

    def __init__(self, config: EngineConfig, pace: StepPace, target_s: Seconds | None, decodes: StepWork) -> None:
        self.work = decodes
        self._model = pace.model
        self._block_size = config.block_size
        self._is_cut = config.max_step_tokens is not None
        self.tokens_left = max(0, (config.max_step_tokens or sys.maxsize) - decodes.num_decoding)
        self._least_left = MIN_CHUNK
        if target_s is None:
            self._limit_s = LONGEST_FREE_STEP_S if pace.is_known else inf
        else:
            self._limit_s = max(target_s, _STRETCH * pace.model.step_s(decodes))

    def chunk(self, num_wanted: int, start: int) -> int:
        """The next tokens, at most `num_wanted`, of a prompt of which `start` are known; 0: not in this step."""
        most = min(num_wanted, self.tokens_left)
        if not self._is_cut or most == 0:
            return most
        seconds_left = self._limit_s - self._model.step_s(self.work)
        if not self.work.num_prefill_tokens:
            seconds_left -= self._model.prefill_base_s - self._model.decode_base_s
        fitting = self._model.tokens_within(seconds_left, start, most)
        if fitting < most and fitting > self._block_size:
            fitting -= (start + fitting) % self._block_size
        return max(fitting, min(most, self._least_left))

    def take(self, num_tokens: int, start: int) -> None:
        """Give a chunk out."""
        self.tokens_left -= num_tokens
        self._least_left = max(0, self._least_left - num_tokens)
        self.work = self.work.and_prefill(num_tokens, start)


def _target_s(sequence: Sequence, config: EngineConfig) -> Seconds:
    slo = sequence.request.slo
    if slo.tpot_s is not None:
        return slo.tpot_s
    return config.tpot_s if slo.slo_class is SloClass.INTERACTIVE else max(config.tpot_s, LONGEST_FREE_STEP_S)

"""How long one engine step takes: two laws in what the step computes, one rule for all rooms that predict it. Pure.

    prefill  a + b·Σn + c·Σ((s + n)² − s²)    chunks of n tokens after s known ones; a whole prompt: a + b·l + c·l²
    decode   a + b·Σcontext + c·B             B sequences, one token each

A step of both takes its prefill and what its decodes add beyond their base: the weights are read once for all.
Source: Sarathi-Serve (OSDI 2024): a step's budget is the largest whose profiled time meets the target.
"""

from dataclasses import dataclass
from math import inf, sqrt

from nearline.protocol.ids import Bytes, Digest, Seconds

_GUESSED_BYTES_PER_S = 10e9
_GUESSED_TOKEN_BYTES_PER_S = 2e11


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes. `prefill_squares` is Σ((s + n)² − s²), `num_context_tokens` counts those decoding only."""

    num_prefill_tokens: int = 0
    prefill_squares: int = 0
    num_decoding: int = 0
    num_context_tokens: int = 0

    def and_prefill(self, num_tokens: int, start: int = 0) -> "StepWork":
        """Add a chunk of `num_tokens` after `start` known ones."""
        squares = self.prefill_squares + num_tokens * (2 * start + num_tokens)
        return StepWork(self.num_prefill_tokens + num_tokens, squares, self.num_decoding, self.num_context_tokens)

    def and_decode(self, num_context_tokens: int) -> "StepWork":
        """Add one token of a sequence that has `num_context_tokens`, this one included."""
        context = self.num_context_tokens + num_context_tokens
        return StepWork(self.num_prefill_tokens, self.prefill_squares, self.num_decoding + 1, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """The six constants of one checkpoint on one device. Units: seconds, per what the name says."""

    prefill_base_s: Seconds
    prefill_per_token_s: Seconds
    prefill_per_square_s: Seconds
    decode_base_s: Seconds
    decode_per_context_s: Seconds
    decode_per_sequence_s: Seconds

    @classmethod
    def guess(cls, num_bytes: Bytes) -> "StepTimeModel":
        """Guess from a checkpoint's size, on the slow side, for a device that was never measured."""
        base_s = num_bytes / _GUESSED_BYTES_PER_S
        return cls(
            prefill_base_s=base_s,
            prefill_per_token_s=num_bytes / _GUESSED_TOKEN_BYTES_PER_S,
            prefill_per_square_s=0.0,
            decode_base_s=base_s,
            decode_per_context_s=0.0,
            decode_per_sequence_s=0.1 * base_s,
        )

    def prefill_s(self, num_tokens: int, start: int = 0) -> Seconds:
        """Predict a step that computes one chunk of a prompt alone."""
        return self.step_s(StepWork().and_prefill(num_tokens, start))

    def decode_s(self, num_sequences: int, num_context_tokens: int) -> Seconds:
        """Predict a step of one token for each sequence; `num_context_tokens` is the sum of their contexts."""
        per_token = self.decode_per_context_s * num_context_tokens + self.decode_per_sequence_s * num_sequences
        return self.decode_base_s + per_token

    def step_s(self, work: StepWork) -> Seconds:
        """Predict any step."""
        decode_s = self.decode_s(work.num_decoding, work.num_context_tokens)
        if not work.num_prefill_tokens:
            return decode_s
        prefill_s = (
            self.prefill_per_token_s * work.num_prefill_tokens + self.prefill_per_square_s * work.prefill_squares
        )
        return self.prefill_base_s + prefill_s + decode_s - self.decode_base_s

    def tokens_within(self, seconds: Seconds, start: int, limit: int) -> int:
        """The most prompt tokens, at most `limit`, that add no more than `seconds` to a step that has paid its base."""
        if seconds <= 0.0 or seconds == inf:
            return limit if seconds == inf else 0
        slope = self.prefill_per_token_s + 2 * start * self.prefill_per_square_s
        below = slope + sqrt(slope * slope + 4 * self.prefill_per_square_s * seconds)
        return limit if 2 * seconds >= limit * below else int(2 * seconds / below)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A model fitted to real steps of one checkpoint on one node.

    The errors are means of |predicted − measured| / measured over the fitted steps. `copy_bytes_per_s` is the rate at
    which KV blocks move to the host and back. `measured_at` is Unix time.
    """

    digest: Digest
    device: str
    num_threads: int
    model: StepTimeModel
    prefill_error: float
    decode_error: float
    num_steps: int
    copy_bytes_per_s: float
    measured_at: Seconds

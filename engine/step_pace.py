"""How long steps take on this device, as believed now: a profile or a guess, corrected by every measured step. Pure."""

from collections.abc import Iterable

from nearline.engine.step_law import Law, fit
from nearline.protocol import Seconds, StepTimeModel, StepWork

FADE = 0.97
"""What a measurement still counts after one more of its kind: about the last 30 decide."""
_SURPRISE = 4.0
"""A step is never believed to have been more than this many times faster or slower than predicted: one that waited
for something else (a page from disk, another process) must not ruin the model, and a model that is truly this wrong
still gets right within a few steps."""
_PROFILE_WEIGHT, _GUESS_WEIGHT = 0.5, 0.01
_PREFILL_ANCHORS = (16, 128, 512, 2048)
_DECODE_ANCHORS = ((1, 64), (1, 2048), (8, 2048), (32, 4096), (32, 32768))


class StepPace:
    """The step-time model, kept right. Two laws, as in the words: prefill and decode."""

    def __init__(self, believed: StepTimeModel, is_profiled: bool) -> None:
        self.model = believed
        self.num_observed = 0
        weight = _PROFILE_WEIGHT if is_profiled else _GUESS_WEIGHT
        m = believed
        self._prefill = Law((m.prefill_base_s, m.prefill_per_token_s, m.prefill_per_square_s), FADE)
        self._decode = Law((m.decode_base_s, m.decode_per_context_s, m.decode_per_sequence_s), FADE)
        for num_tokens in _PREFILL_ANCHORS:
            self._prefill.anchor((1, num_tokens, num_tokens**2), weight)
        for num_sequences, num_context_tokens in _DECODE_ANCHORS:
            self._decode.anchor((1, num_context_tokens, num_sequences), weight)

    def observe(self, work: StepWork, seconds: Seconds) -> None:
        """Take in how long a step took."""
        predicted = self.model.step_s(work)
        seconds = min(max(seconds, predicted / _SURPRISE), predicted * _SURPRISE) if predicted > 0.0 else seconds
        if seconds <= 0.0:
            return
        self.num_observed += 1
        if work.num_prefill_tokens:
            decode_s = self.model.decode_s(work.num_decoding, work.num_context_tokens) - self.model.decode_base_s
            # A step that took no longer than its decodes says no more than that its prefill was cheap.
            self._learn(self._prefill, _prefill_features(work), max(seconds - decode_s, 0.1 * seconds))
        else:
            self._learn(self._decode, _decode_features(work), seconds)
        self.model = _model(self._prefill.coefficients, self._decode.coefficients)

    def _learn(self, law: Law, features: tuple[int, int, int], seconds: Seconds) -> None:
        law.observe(features, seconds)
        law.settle(2)


def fit_model(steps: Iterable[tuple[StepWork, Seconds]]) -> tuple[StepTimeModel, float, float]:
    """Fit measured steps, each of prefill or of decode alone; return the model and both mean relative errors."""
    measured = list(steps)
    prefill, prefill_error = fit((_prefill_features(work), s) for work, s in measured if work.num_prefill_tokens)
    decode, decode_error = fit((_decode_features(work), s) for work, s in measured if not work.num_prefill_tokens)
    return _model(prefill, decode), prefill_error, decode_error


def _prefill_features(work: StepWork) -> tuple[int, int, int]:
    return 1, work.num_prefill_tokens, work.prefill_squares


def _decode_features(work: StepWork) -> tuple[int, int, int]:
    return 1, work.num_context_tokens, work.num_decoding


def _model(prefill: list[float], decode: list[float]) -> StepTimeModel:
    return StepTimeModel(
        prefill_base_s=prefill[0],
        prefill_per_token_s=prefill[1],
        prefill_per_square_s=prefill[2],
        decode_base_s=decode[0],
        decode_per_context_s=decode[1],
        decode_per_sequence_s=decode[2],
    )

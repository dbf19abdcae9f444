"""How long steps take on this device, as believed now: a profile or a guess, corrected by every measured step. Pure."""

from collections.abc import Iterable, Sequence

from nearline.engine.step_law import Law, fit
from nearline.protocol import Seconds, StepTimeModel, StepWork

FADE = 0.97
"""What a measurement still counts after one more of its kind: about the last 30 decide."""
SURPRISE = 4.0
"""A step this many times faster or slower than predicted is ignored, for it may have waited for something else (a page
from disk, another process). A second one in a row is believed: the device is not what it was thought to be, so the
whole law is scaled, by no more than this, and learned anew."""
_PROFILE_WEIGHT, _GUESS_WEIGHT = 0.5, 0.01
_PREFILL_ANCHORS = tuple((1, n, n * n) for n in (16, 128, 512, 2048))
_DECODE_ANCHORS = ((1, 64, 1), (1, 2048, 1), (1, 2048, 8), (1, 4096, 32), (1, 32768, 32))

Features = tuple[int, int, int]


class StepPace:
    """The step-time model, kept right. Two laws, as in the words: prefill and decode."""

    def __init__(self, believed: StepTimeModel, is_profiled: bool) -> None:
        self.model = m = believed
        self.is_known = is_profiled
        """Whether anything was ever measured, here or for the profile."""
        weight = _PROFILE_WEIGHT if is_profiled else _GUESS_WEIGHT
        prefill = (m.prefill_base_s, m.prefill_per_token_s, m.prefill_per_square_s)
        self._prefill = _LearnedLaw(prefill, _PREFILL_ANCHORS, weight)
        decode = (m.decode_base_s, m.decode_per_context_s, m.decode_per_sequence_s)
        self._decode = _LearnedLaw(decode, _DECODE_ANCHORS, weight)

    def observe(self, work: StepWork, seconds: Seconds) -> None:
        """Take in how long a step took."""
        if seconds <= 0.0:
            return
        self.is_known = True
        if work.num_prefill_tokens:
            decode_s = self.model.decode_s(work.num_decoding, work.num_context_tokens) - self.model.decode_base_s
            # A step that took no longer than its decodes says no more than that its prefill was cheap.
            self._prefill.observe(_prefill_features(work), max(seconds - decode_s, 0.1 * seconds))
        else:
            self._decode.observe(_decode_features(work), seconds)
        self.model = _model(self._prefill.coefficients, self._decode.coefficients)


class _LearnedLaw:
    def __init__(self, coefficients: Sequence[float], anchors: Sequence[Features], weight: float) -> None:
        self._anchors = anchors
        self._was_slow: bool | None = None
        self._believe(coefficients, weight)

    @property
    def coefficients(self) -> list[float]:
        return self._law.coefficients

    def observe(self, features: Features, seconds: Seconds) -> None:
        predicted = self._law.predict(features)
        if predicted <= 0.0 or predicted / SURPRISE <= seconds <= predicted * SURPRISE:
            self._was_slow = None
            self._law.observe(features, seconds, FADE)
            self._law.settle(2)
            return
        is_slow = seconds > predicted
        if self._was_slow is not is_slow:
            self._was_slow = is_slow
            return
        self._was_slow = None
        factor = min(max(seconds / predicted, 1 / SURPRISE), SURPRISE)
        self._believe([factor * x for x in self.coefficients], _GUESS_WEIGHT)

    def _believe(self, coefficients: Sequence[float], weight: float) -> None:
        self._law = Law(coefficients)
        for features in self._anchors:
            self._law.anchor(features, weight)


def fit_model(steps: Iterable[tuple[StepWork, Seconds]]) -> tuple[StepTimeModel, float, float]:
    """Fit measured steps, each of prefill or of decode alone; return the model and both mean relative errors."""
    measured = list(steps)
    prefill, prefill_error = fit((_prefill_features(work), s) for work, s in measured if work.num_prefill_tokens)
    decode, decode_error = fit((_decode_features(work), s) for work, s in measured if not work.num_prefill_tokens)
    return _model(prefill, decode), prefill_error, decode_error


def _prefill_features(work: StepWork) -> Features:
    return 1, work.num_prefill_tokens, work.prefill_squares


def _decode_features(work: StepWork) -> Features:
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

"""What merging saves on this device, learned from the decoding steps of one adapter and of the base alone. Pure."""

from nearline.engine.merging import MergeCosts
from nearline.engine.step_law import Law
from nearline.engine.types import Batch
from nearline.protocol import Seconds, StepTimeModel

_GUESSED_SHARE = 0.08
"""Of the base's time, what an adapter adds to a step: rank 16 on all projections of a small model."""
_GUESS_WEIGHT, _FADE = 0.01, 0.995
_SURPRISE, _PATIENCE = 3.0, 3
_ANCHORS = ((1, 1, 64, 0), (1, 8, 512, 1), (1, 32, 2048, 0), (1, 32, 32768, 1))


class MergeMeter:
    """One law: a base, sequences, their context, and an adapter, which merged steps and the base's own do not have.

    About the last 200 steps decide. One that took three times longer than predicted, or a third, waited for something
    else; three in a row do not.
    """

    def __init__(self, believed: StepTimeModel, merge_s: Seconds) -> None:
        base_s = believed.decode_base_s
        per_s = (believed.decode_per_sequence_s, believed.decode_per_context_s)
        self._law = Law([base_s, *per_s, _GUESSED_SHARE * base_s])
        for features in _ANCHORS:
            self._law.anchor(features, _GUESS_WEIGHT)
        self._merge_s = merge_s
        self._num_surprises = 0

    @property
    def costs(self) -> MergeCosts:
        return MergeCosts(saving_s=self._law.coefficients[3], merge_s=self._merge_s)

    def step(self, batch: Batch, seconds: Seconds) -> None:
        """Take in a step's time. Steps with prompts in them or of several adapters say nothing."""
        work = batch.work
        adapters = list(dict.fromkeys(item.sequence.request.adapter_digest for item in batch.items))
        if work.num_prefill_tokens or len(adapters) > 1 or seconds <= 0.0:
            return
        is_unmerged = adapters[0] is not None and batch.merged is None
        features = (1, work.num_decoding, work.num_context_tokens, int(is_unmerged))
        predicted_s = self._law.predict(features)
        is_surprise = not predicted_s / _SURPRISE <= seconds <= predicted_s * _SURPRISE
        self._num_surprises = self._num_surprises + 1 if is_surprise else 0
        if not is_surprise or self._num_surprises >= _PATIENCE:
            self._law.observe(features, seconds, _FADE)
            self._law.settle(2)

    def copy(self, seconds: Seconds) -> None:
        """Take in what a whole copy took."""
        self._merge_s += 0.5 * (seconds - self._merge_s)

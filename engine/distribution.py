"""One row of logits as a probability distribution: adjusted by a request's wishes, filtered, drawn from, reported.

Plain numpy on one row, so that a token never depends on what else is in the batch. Reads no clock and no generator:
the randomness of (seed, position) is a hash.
"""

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from nearline.protocol import SamplingParams, TokenLogprob
from nearline.protocol.errors import InvalidRequest

Row = NDArray[np.float32]

MIN_TEMPERATURE = 1e-5
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SUM_WIDTH = 512
_PEAK_WIDTH = 64


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to (seed, position), the same on every machine and in every batch.

    Source: the SplitMix64 finaliser, applied to the seed and again to the position's step from there.
    """
    return (_mix(_mix(seed & _MASK) + position * _GOLDEN) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def is_greedy(params: SamplingParams) -> bool:
    """Say whether the best token always wins: at temperature 0, and where dividing by it would overflow."""
    return params.temperature < MIN_TEMPERATURE


def adjusts(params: SamplingParams, num_generated: int) -> bool:
    """Say whether `adjust` would change the logits of this request at all."""
    return bool(
        params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or num_generated < params.min_tokens
    )


def adjust(logits: Row, params: SamplingParams, prompt: Seq[int], generated: Seq[int], ends: Seq[int]) -> None:
    """Apply bias, `min_tokens` and penalties to a row in place; `ends` are the tokens that would end the sequence.

    Repetition penalises tokens of prompt and output (positive logits divided, negative multiplied); frequency counts
    and presence marks tokens of the output only. Raises InvalidRequest for a bias outside the vocabulary.
    Source: the order and meaning of vLLM's sampler; repetition as in transformers.
    """
    for token_id, bias in params.logit_bias:
        if not 0 <= token_id < logits.shape[0]:
            raise InvalidRequest(f"logit_bias names token {token_id}; the vocabulary has {logits.shape[0]}")
        logits[token_id] += bias
    if len(generated) < params.min_tokens:
        logits[[token for token in ends if 0 <= token < logits.shape[0]]] = -np.inf
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray([*prompt, *generated], dtype=np.int64))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and len(generated) > 0:
        tokens, counts = np.unique(np.asarray(generated, dtype=np.int64), return_counts=True)
        logits[tokens] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)


def draw(logits: Row, params: SamplingParams, position: int) -> int:
    """Choose the token of (seed, position): the point of the cumulative distribution at its uniform.

    Filters in this order, each on what the one before left: temperature, min_p (relative to the best), top_k (ties
    with the k-th stay), top_p (smallest set of best tokens that reaches it). Kept tokens stand in vocabulary order.
    """
    weights = np.exp((logits - logits.max()) * np.float32(1.0 / params.temperature))
    kept = _kept(weights, params)
    point = uniform(params.seed, position)
    if kept is None:
        return _point_of(weights, point)
    return int(kept[_point_of(weights[kept], point)])


def wishes_of(params: SamplingParams, position: int) -> tuple[float, float, float, float, float]:
    """Say what `draw` would do as numbers, a column of kernels.sample: point, 1 / temperature, top_k, top_p, min_p."""
    if is_greedy(params):
        return 0.0, 0.0, 0.0, 1.0, 0.0
    point, inverse = uniform(params.seed, position), float(np.float32(1.0 / params.temperature))
    return point, inverse, float(params.top_k), params.top_p, params.min_p


def _kept(weights: Row, params: SamplingParams) -> NDArray[np.int64] | None:
    """Indices that survive the filters, ascending; None when no filter is on."""
    least = np.float32(params.min_p)
    if 0 < params.top_k < weights.shape[0]:
        least = max(least, _kth_largest(weights, params.top_k))
    if params.top_p >= 1.0:
        return np.flatnonzero(weights >= least) if least > 0 else None
    if least > 0:
        kept = np.flatnonzero(weights >= least)
        return kept[_nucleus(weights[kept], params.top_p, float(weights[kept].sum(dtype=np.float64)))]
    total = float(weights.sum(dtype=np.float64))
    # Tokens lighter than this weigh less than 1 - top_p together, so none of them can be in the nucleus.
    kept = np.flatnonzero(weights >= (1.0 - params.top_p) / weights.shape[0] * total * (1 - 1e-6))
    return kept[_nucleus(weights[kept], params.top_p, total)]


def _kth_largest(values: Row, k: int) -> np.float32:
    """Return the k-th largest value. The k-th largest of block maxima bounds it from below: little is left to sort."""
    peaks = np.maximum.reduceat(values, np.arange(0, values.shape[0], _PEAK_WIDTH))
    if k <= len(peaks):
        values = values[values >= np.partition(peaks, -k)[-k]]
    return np.float32(np.partition(values, -k)[-k])


def _nucleus(weights: Row, top_p: float, total: float) -> NDArray[np.int64]:
    """Indices, ascending, of the fewest heaviest weights that reach `top_p` of `total`; of equals, the first ones."""
    heaviest_first = np.sort(weights)[::-1]
    num_kept = int(np.searchsorted(np.cumsum(heaviest_first, dtype=np.float64), top_p * total, side="left")) + 1
    if num_kept >= weights.shape[0]:
        return np.arange(weights.shape[0])
    least = heaviest_first[num_kept - 1]
    above = np.flatnonzero(weights > least)
    equal = np.flatnonzero(weights == least)[: num_kept - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _point_of(weights: Row, point: float) -> int:
    """Return the index at which the running sum, in fp64, passes `point` of the whole. Skips weight 0."""
    starts = np.arange(0, weights.shape[0], _SUM_WIDTH)
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = min(point * sums[-1], np.nextafter(sums[-1], 0.0))
    # Two levels, because summing blocks is far cheaper than a running sum over a whole vocabulary.
    block = int(np.searchsorted(sums, target, side="right"))
    before = sums[block - 1] if block else 0.0
    part = weights[starts[block] : starts[block] + _SUM_WIDTH]
    index = int(np.searchsorted(np.cumsum(part, dtype=np.float64), target - before, side="right"))
    # The two sums round differently: never step past the block's last token with any weight.
    return int(starts[block]) + min(index, int(np.flatnonzero(part)[-1]))


def logprob(raw: Row, token_id: int, num_top: int) -> TokenLogprob:
    """Report the model's own log-probabilities, before bias, penalties and temperature; alternatives best first."""
    best = raw.max()
    log_total = float(best) + float(np.log(np.exp(raw - best).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        num_top = min(num_top, raw.shape[0])
        candidates = np.flatnonzero(raw >= _kth_largest(raw, num_top))
        ordered = candidates[np.argsort(-raw[candidates], kind="stable")][:num_top]
        top = tuple((int(token), float(raw[token]) - log_total) for token in ordered)
    return TokenLogprob(float(raw[token_id]) - log_total, top)

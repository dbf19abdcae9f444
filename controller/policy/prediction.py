"""How long an answer will be, learned per model from its own past; and shortest-predicted-first, with a bound. Pure.

A prediction starts from all answers of the model and is pulled towards those of the same prompt size, of the same
tenant and adapter, and of the same tenant, adapter, prompt size and output limit, each as far as it has been seen.
Old answers fade, so a change of traffic is learned within a few hundred of them. Nothing here reads a prompt.
Source: [ssjf] shortest predicted first; its predictor is a language model, ours costs microseconds.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from nearline.protocol import Digest, Seconds, TenantId

BUCKET_LIMITS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Upper ends, in tokens, of the buckets of predicted length; longer ones share the last bucket."""
OVERTAKE_FRACTION = 0.5
"""Part of its class's target during which shorter requests of its tenant may overtake one; then only older ones may."""

_MEMORY = 256.0
_PRIOR_WEIGHT = 8.0
PRIOR_TOKENS = 128.0
"""Length of an answer of which nothing is known."""
_MAX_KEYS = 4096

_Key = tuple[object, ...]


class Features(NamedTuple):
    """What is known of a request before it runs."""

    tenant: TenantId
    adapter_digest: Digest | None
    num_prompt_tokens: int
    max_tokens: int


@dataclass(slots=True)
class Moments:
    """Mean and variance of what was seen, older values fading: never more than `_MEMORY` values' weight."""

    weight: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, value: float) -> None:
        weight = self.weight
        self.weight = weight = weight + 1.0 if weight < _MEMORY - 1.0 else _MEMORY
        step, delta = 1.0 / weight, value - self.mean
        self.mean += step * delta
        self.variance = (1.0 - step) * (self.variance + step * delta * delta)


@dataclass(slots=True)
class Calibration:
    """How good predictions were: the error (predicted − actual), its size and the actual length, in tokens."""

    num_answers: int = 0
    error: Moments = field(default_factory=Moments)
    size: Moments = field(default_factory=Moments)
    actual: Moments = field(default_factory=Moments)

    def add(self, predicted: float, actual: float) -> None:
        self.num_answers += 1
        self.error.add(predicted - actual)
        self.size.add(abs(predicted - actual))
        self.actual.add(actual)


class LengthPredictor:
    """One model's memory of its answers. Bounded: at most `_MAX_KEYS` kinds of request, the least recent forgotten."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self._moments: OrderedDict[_Key, Moments] = OrderedDict()

    def predict(self, features: Features) -> float:
        """Return the expected number of output tokens, from 1 to max_tokens."""
        mean = PRIOR_TOKENS
        for key in _keys(features):
            moments = self._moments.get(key)
            if moments is not None:
                weight = moments.weight
                mean = (weight * moments.mean + _PRIOR_WEIGHT * mean) / (weight + _PRIOR_WEIGHT)
        return max(1.0, min(float(features.max_tokens), mean))

    def learn(self, features: Features, predicted: float, actual: int) -> None:
        """Take note of an answer that ended by itself, and of what had been predicted for it."""
        self.calibration.add(predicted, actual)
        for key in _keys(features):
            moments = self._moments.get(key)
            if moments is None:
                moments = self._moments[key] = Moments()
            moments.add(actual)
            self._moments.move_to_end(key)
        while len(self._moments) > _MAX_KEYS:
            self._moments.popitem(last=False)


def bucket_of(num_tokens: float) -> int:
    """Return the bucket of a predicted length: 0 for the shortest."""
    return bisect_left(BUCKET_LIMITS, num_tokens)


def remaining_tokens(predicted: float, num_generated: float, max_tokens: int) -> float:
    """Estimate what is still to come of an answer: the rest of its prediction, or, once it has outrun that, half of
    what it has, for among long answers the longer have more to come."""
    rest = predicted - num_generated if num_generated < predicted else 0.5 * num_generated
    return min(max(1.0, rest), max(1.0, max_tokens - num_generated))


class Waiting(Protocol):
    """A waiting request as the order among one tenant's own requests sees it."""

    @property
    def order(self) -> int: ...
    @property
    def arrived_at(self) -> Seconds: ...
    @property
    def length_bucket(self) -> int: ...
    @property
    def target_s(self) -> Seconds: ...


W = TypeVar("W", bound=Waiting)


def shortest_first(requests: Iterable[W], now: Seconds) -> list[W]:
    """Order one tenant's requests: those that waited `OVERTAKE_FRACTION` of their target by age, then by bucket.

    So a request waits at most that long, plus the time it takes to serve what its tenant sent before it.
    """

    def rank(request: W) -> tuple[bool, int, int]:
        is_patient = now < request.arrived_at + OVERTAKE_FRACTION * request.target_s
        return (is_patient, request.length_bucket if is_patient else 0, request.order)

    return sorted(requests, key=rank)


def _keys(features: Features) -> tuple[_Key, ...]:
    """Kinds of request it belongs to, the widest first."""
    size, limit = features.num_prompt_tokens.bit_length(), features.max_tokens.bit_length()
    caller = (features.tenant, features.adapter_digest)
    return ((), (size,), caller, (*caller, size, limit))

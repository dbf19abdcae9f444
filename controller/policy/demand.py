"""How many replicas the traffic of a model keeps busy, and whether two on one device serve more than one. Pure.

Demand is arrivals per second over the last half minute or so, times the time a request holds a place (Little's law).
Whether replicas may share a device is measured: their pace while the other works, against their pace alone.
"""

from dataclasses import dataclass, field
from math import exp

from nearline.controller.policy.prediction import Moments
from nearline.protocol import Seconds

_SPAN_S: Seconds = 30.0
_MIN_ARRIVALS = 5.0
_MIN_PACES = 8.0


@dataclass(slots=True)
class Demand:
    """Arrivals, fading with `_SPAN_S`."""

    weight: float = 0.0
    noted_at: Seconds = 0.0

    def note(self, now: Seconds) -> None:
        """Count one arrival."""
        self.weight = self.weight * exp((self.noted_at - now) / _SPAN_S) + 1.0
        self.noted_at = now

    def busy_places(self, service_s: Seconds, now: Seconds) -> float:
        """Places that are busy on average; 0 while too little is known to say."""
        weight = self.weight * exp((self.noted_at - now) / _SPAN_S)
        return weight / _SPAN_S * service_s if weight >= _MIN_ARRIVALS else 0.0


@dataclass(slots=True)
class Sharing:
    """Seconds per token of a model's sequences, with its device to itself and while other instances worked there."""

    alone: Moments = field(default_factory=Moments)
    shared: Moments = field(default_factory=Moments)

    def note(self, pace_s: Seconds, is_shared: bool) -> None:
        (self.shared if is_shared else self.alone).add(pace_s)

    @property
    def gain(self) -> float | None:
        """Throughput of two instances on one device over that of one; None until both were seen often enough."""
        if min(self.alone.weight, self.shared.weight) < _MIN_PACES or not self.shared.mean:
            return None
        return 2.0 * self.alone.mean / self.shared.mean

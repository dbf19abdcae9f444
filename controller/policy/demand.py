"""How many replicas the traffic of a model keeps busy, and whether two on one device serve more than one. Pure.

Demand is arrivals per second over the last half minute or so, times the time a request holds a place (Little's law).
Whether replicas may share a device is measured: the pace of answers beside one busy replica of the same model, against
that of answers alone on the device, each while about as many ran in their own instance. Answers beside anything else,
or whose company changed on the way, count for neither: they would blame a replica for what other models take.
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
    """Seconds per token of a model's sequences with its device to itself, and beside one replica that worked, too; by
    the number that ran in their own instance, to the next power of two: larger batches are slower by themselves."""

    alone: dict[int, Moments] = field(default_factory=dict)
    shared: dict[int, Moments] = field(default_factory=dict)

    def note(self, pace_s: Seconds, num_running: int, is_shared: bool) -> None:
        rows, size = self.shared if is_shared else self.alone, num_running.bit_length()
        if size not in rows:
            rows[size] = Moments()
        rows[size].add(pace_s)

    @property
    def gain(self) -> float | None:
        """Throughput of two instances on one device over that of one with as many sequences each; None until sizes were
        seen often enough both ways."""
        total, weight = 0.0, 0.0
        for size, alone in self.alone.items():
            shared = self.shared.get(size)
            if shared is not None and shared.mean > 0.0:
                both = min(alone.weight, shared.weight)
                total, weight = total + both * 2.0 * alone.mean / shared.mean, weight + both
        return total / weight if weight >= _MIN_PACES else None

"""How fast bytes have left each tier. What that means for a start is estimated by the controller. Pure."""

import math

from nearline.protocol import Bytes, BytesPerSecond, Seconds, Tier, TierBandwidth

SEED_BYTES_PER_S: dict[Tier, BytesPerSecond] = {Tier.REMOTE: 1e8, Tier.SSD: 1e9, Tier.DRAM: 1e10}
"""What is assumed of a tier nobody has measured: a 1 Gbit/s link, a modest SSD, one memory channel's copy."""
_HALF_WEIGHT_BYTES = 256 * 1024 * 1024
"""An observation of this many bytes counts as much as everything before it."""
_MIN_BYTES = 4 * 1024 * 1024
"""Smaller observations measure latency, not bandwidth."""


class Bandwidths:
    """Exponentially weighted bandwidth of each tier; an observation weighs by the bytes it moved."""

    def __init__(self) -> None:
        self._rates = dict(SEED_BYTES_PER_S)
        self._measured: dict[Tier, bool] = dict.fromkeys(SEED_BYTES_PER_S, False)

    def observe(self, tier: Tier, num_bytes: Bytes, seconds: Seconds) -> None:
        """Take one measurement. The first real one replaces the assumed value."""
        if num_bytes < _MIN_BYTES or seconds <= 0:
            return
        rate = num_bytes / seconds
        weight = 1.0 - math.pow(0.5, num_bytes / _HALF_WEIGHT_BYTES) if self._measured[tier] else 1.0
        self._rates[tier] += weight * (rate - self._rates[tier])
        self._measured[tier] = True

    def __getitem__(self, tier: Tier) -> BytesPerSecond:
        return self._rates[tier]

    def as_tuple(self) -> tuple[TierBandwidth, ...]:
        return tuple(TierBandwidth(tier, rate) for tier, rate in self._rates.items())

"""Bandwidths follow what was measured."""

import pytest

from nearline.checkpoint_store import Bandwidths
from nearline.protocol import Tier

GB = 10**9


def test_the_first_measurement_replaces_the_assumption_and_later_ones_weigh_by_bytes() -> None:
    bandwidths = Bandwidths()
    bandwidths.observe(Tier.SSD, 64 * 1024 * 1024, 0.01)
    assert bandwidths[Tier.SSD] == pytest.approx(64 * 1024 * 1024 / 0.01)
    before = bandwidths[Tier.SSD]
    bandwidths.observe(Tier.SSD, 256 * 1024 * 1024, 256 * 1024 * 1024 / (before / 2))
    assert bandwidths[Tier.SSD] == pytest.approx(0.75 * before)  # half the weight on half the rate


@pytest.mark.parametrize(("num_bytes", "seconds"), [(1024, 1e-6), (100 * GB, 0.0), (100 * GB, -1.0)])
def test_what_measures_no_bandwidth_is_ignored(num_bytes: int, seconds: float) -> None:
    bandwidths = Bandwidths()
    before = bandwidths[Tier.SSD]
    bandwidths.observe(Tier.SSD, num_bytes, seconds)
    assert bandwidths[Tier.SSD] == before


def test_every_tier_but_the_device_is_reported() -> None:
    assert [b.tier for b in Bandwidths().as_tuple()] == [Tier.REMOTE, Tier.SSD, Tier.DRAM]

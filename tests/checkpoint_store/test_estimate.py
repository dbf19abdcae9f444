"""Seconds to start follow from where the bytes are; bandwidths follow what was measured."""

import pytest

from nearline.checkpoint_store import Bandwidths, load_s
from nearline.protocol import Digest, Residency, Tier

GB = 10**9
RATES = {Tier.REMOTE: 0.1 * GB, Tier.SSD: 1.0 * GB, Tier.DRAM: 10.0 * GB}


def residency(num_bytes: float, ssd: float, dram: float) -> Residency:
    return Residency(Digest("d"), int(num_bytes), int(ssd), int(dram))


@pytest.mark.parametrize(
    ("where", "queued", "expected_s"),
    [
        (residency(2 * GB, 2 * GB, 2 * GB), 0, 0.2),
        (residency(2 * GB, 2 * GB, 2 * GB), 50 * GB, 0.2),  # in DRAM: the disk's queue does not matter
        (residency(2 * GB, 2 * GB, 0), 0, 2.0),
        (residency(2 * GB, 2 * GB, 0), 3 * GB, 5.0),
        (residency(2 * GB, 2 * GB, 1 * GB), 0, 1.1),
        (residency(2 * GB, 0, 0), 0, 20.0),
        (residency(2 * GB, 1 * GB, 0.5 * GB), 0, 10.0 + 0.5 + 0.05),
        (residency(2 * GB, 0, 2 * GB), 0, 0.2),  # deleted from SSD, still in DRAM
    ],
)
def test_each_byte_costs_what_its_tier_takes(where: Residency, queued: int, expected_s: float) -> None:
    assert load_s(where, RATES, queued) == pytest.approx(expected_s)


def test_the_first_measurement_replaces_the_assumption_and_later_ones_weigh_by_bytes() -> None:
    bandwidths = Bandwidths()
    assert not bandwidths.is_measured(Tier.SSD)
    bandwidths.observe(Tier.SSD, 64 * 1024 * 1024, 0.01)
    assert bandwidths[Tier.SSD] == pytest.approx(64 * 1024 * 1024 / 0.01)
    assert bandwidths.is_measured(Tier.SSD)
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

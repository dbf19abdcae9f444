"""How many engine processes a device should have: enough to start without waiting, never a tight respawn loop. Pure."""

from dataclasses import dataclass

from nearline.node_agent.types import CoreConfig, DeviceSlots
from nearline.protocol import Seconds


@dataclass(frozen=True, slots=True)
class Demand:
    """What one device has and needs now. `num_hungry` instances hold a slot and no process."""

    num_hungry: int
    num_starting: int
    num_idle: int
    num_free_slots: int


@dataclass(frozen=True, slots=True)
class Supply:
    """Start or end this many processes; look again at `look_at`."""

    num_starts: int = 0
    num_ends: int = 0
    look_at: Seconds | None = None
    reason: str = ""


def supply(demand: Demand, device: DeviceSlots, config: CoreConfig, now: Seconds) -> Supply:
    """Decide starts and ends.

    Hungry instances come first and at once. Spares are started or ended when the device has been quiet for a while:
    warming one up would take the cores from a first token, and a process that was just let go of is what the next
    model in its slot takes. After a failed start, one process at a time is tried.
    """
    have = demand.num_starting + demand.num_idle
    spares = min(config.num_prewarmed, max(1, demand.num_free_slots))
    missing = demand.num_hungry - have if demand.num_hungry else spares - have
    if missing <= 0:
        # Who is hungry takes a process as soon as its frames are leased: what it leaves is what may be too much.
        surplus = demand.num_idle - demand.num_hungry - config.num_prewarmed
        if surplus > 0 and now < device.quiet_at:
            return Supply(look_at=device.quiet_at, reason="the device is busy")
        return Supply(num_ends=max(0, surplus), reason="more pre-warmed processes than wanted")
    if now < device.retry_at:
        return Supply(look_at=device.retry_at, reason="backing off after a failure")
    if not demand.num_hungry and now < device.quiet_at:
        return Supply(look_at=device.quiet_at, reason="the device is busy")
    num_starts = min(missing, 1 - min(1, demand.num_starting)) if device.num_failures else missing
    return Supply(num_starts, reason="an instance waits" if demand.num_hungry else "pre-warmed spare")


def backoff_s(num_failures: int, config: CoreConfig) -> Seconds:
    """Wait this long after the n-th failure in a row: doubling, capped."""
    doubled: float = config.backoff_s * 2.0 ** min(num_failures - 1, 30)
    return min(config.max_backoff_s, doubled)

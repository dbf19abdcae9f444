"""Where adapters live: which instances of a model should serve which of its adapters, from predicted traffic. Pure.

Requests of an adapter go to its homes first, so each instance reads, keeps and batches few adapters; dispatch leaves a
home that is much fuller, and `balance` moves what waits there to an instance with a free place, its adapter with it.
Source: dLoRA (OSDI 2024), proactive placement: every adapter one home, then more for those whose share of the traffic
exceeds their share of the homes, as long as the burst tolerance does not fall.

What is asked for often is read by its homes ahead of its next request there (`to_prepare`).
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from nearline.protocol import Digest, InstanceId, Seconds

HALF_LIFE_S: Seconds = 300.0
"""After which a request counts half towards an adapter's traffic."""
_FORGOTTEN = 0.01


@dataclass(slots=True)
class AdapterTraffic:
    """How often adapters are asked for, lately. Counts fade; what has faded away is forgotten."""

    _counts: dict[Digest, float] = field(default_factory=dict)
    _at: Seconds = 0.0

    def note(self, adapter: Digest, now: Seconds) -> None:
        """Count a request."""
        self._fade(now)
        self._counts[adapter] = self._counts.get(adapter, 0.0) + 1.0

    def expected(self, now: Seconds) -> Mapping[Digest, float]:
        """Traffic by adapter, in requests that still count."""
        self._fade(now)
        return self._counts

    def forget(self, adapter: Digest) -> None:
        """Expect nothing more of an adapter that is gone."""
        self._counts.pop(adapter, None)

    def _fade(self, now: Seconds) -> None:
        passed = now - self._at
        if passed < 0.05 * HALF_LIFE_S:
            return
        share = 0.5 ** (passed / HALF_LIFE_S)
        faded = {adapter: count * share for adapter, count in self._counts.items()}
        self._counts = {adapter: count for adapter, count in faded.items() if count > _FORGOTTEN}
        self._at = now


@dataclass(frozen=True, slots=True)
class Home:
    """An instance that may be a home: how many adapters it can keep at once, and which it has been home to."""

    instance_id: InstanceId
    num_adapters: int
    present: Mapping[Digest, None]


def homes(traffic: Mapping[Digest, float], instances: Sequence[Home]) -> dict[InstanceId, dict[Digest, None]]:
    """Choose the homes of every adapter.

    1. Each gets one, the most asked for first: the instance with the least traffic, but the one it lives in already
       while that carries less than its fair share. So adapters stay where they are unless that is unfair.
    2. While places are left: another home for the adapter whose share of the traffic exceeds its share of the homes
       most, where the least is expected, if that does not make the burst tolerance fall.
    """
    chosen: dict[InstanceId, dict[Digest, None]] = {one.instance_id: {} for one in instances}
    if not instances or not traffic:
        return chosen
    load = dict.fromkeys(chosen, 0.0)
    fair = sum(traffic.values()) / len(instances)
    where: dict[Digest, list[InstanceId]] = {}
    for adapter in sorted(traffic, key=lambda adapter: (-traffic[adapter], adapter)):
        free = [one for one in instances if len(chosen[one.instance_id]) < one.num_adapters] or list(instances)
        staying = [one for one in free if adapter in one.present and load[one.instance_id] + traffic[adapter] <= fair]
        home = min(staying or free, key=lambda one: (load[one.instance_id], one.instance_id)).instance_id
        chosen[home][adapter], where[adapter] = None, [home]
        load[home] += traffic[adapter]
    while (more := _next_home(traffic, instances, chosen, where)) is not None:
        adapter, home = more
        chosen[home][adapter] = None
        where[adapter].append(home)
    return chosen


def to_prepare(
    traffic: Mapping[Digest, float],
    at_home: Container[Digest],
    known: Container[Digest],
    num_adapters: int,
    least: float,
) -> list[Digest]:
    """Name the adapters an instance should read before their next request, the most asked for first.

    Of those `at_home` there with a traffic of `least` or more, as many as it can keep at once; without those that are
    `known`: it was sent them, has them, or was asked to read them before.
    """
    hot = [adapter for adapter in traffic if traffic[adapter] >= least and adapter in at_home]
    hot.sort(key=lambda adapter: (-traffic[adapter], adapter))
    return [adapter for adapter in hot[:num_adapters] if adapter not in known]


def burst_tolerance(
    traffic: Mapping[Digest, float], where: Mapping[Digest, Sequence[InstanceId]], room: Mapping[InstanceId, float]
) -> float:
    """The least, over all adapters, of the room in its homes over its traffic: how many times more it could bear."""
    return min(sum(room[home] for home in homes) / traffic[adapter] for adapter, homes in where.items())


def _next_home(
    traffic: Mapping[Digest, float],
    instances: Sequence[Home],
    chosen: Mapping[InstanceId, Mapping[Digest, None]],
    where: Mapping[Digest, Sequence[InstanceId]],
) -> tuple[Digest, InstanceId] | None:
    total, num_homes = sum(traffic.values()), sum(len(homes) for homes in where.values())
    excess = {a: traffic[a] / total - len(where[a]) / num_homes for a in traffic if len(where[a]) < len(instances)}
    load = {
        one.instance_id: sum(traffic[adapter] / len(where[adapter]) for adapter in chosen[one.instance_id])
        for one in instances
    }
    room = {one.instance_id: max(0.0, 1.0 - len(chosen[one.instance_id]) / one.num_adapters) for one in instances}
    before = burst_tolerance(traffic, where, room)
    for adapter in sorted((a for a in excess if excess[a] > 0.0), key=lambda a: (-excess[a], a)):
        free = [
            one for one in instances
            if adapter not in chosen[one.instance_id] and len(chosen[one.instance_id]) < one.num_adapters
        ]  # fmt: skip
        if not free:
            continue
        one = min(free, key=lambda one: (load[one.instance_id], one.instance_id))
        after_room = room | {one.instance_id: room[one.instance_id] - 1.0 / one.num_adapters}
        after = burst_tolerance(traffic, {**where, adapter: [*where[adapter], one.instance_id]}, after_room)
        if after >= before:
            return adapter, one.instance_id
    return None

"""Which request that waits inside one instance should move to another that would run it now. Pure.

A move makes the pair strictly more equal: the source runs all its places and has somebody waiting, the destination has
a place free. So requests never go to and fro, and `may_move` bounds how often any moves. What has a token moves only by
policy/migration.py.
Source: [llumnix] pairs of instances, dispatched work that migrates; what waits moves here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nearline.controller.config import CoreConfig
from nearline.controller.policy.dispatch import affinity, has_room, load_of
from nearline.controller.policy.views import InstanceView, RunningView
from nearline.protocol import InstanceId, Seconds


@dataclass(frozen=True, slots=True)
class Move:
    request: RunningView
    source_id: InstanceId
    target_id: InstanceId
    reason: str


def may_move(request: RunningView, now: Seconds, config: CoreConfig) -> bool:
    """Whether a request may move again: few times, not soon after the last; no suspect, no promised pace."""
    if request.num_moves >= config.max_moves or request.num_fruitless:
        return False
    if request.has_token and request.info.slo.tpot_s is not None:
        return False
    return request.moved_at is None or now >= request.moved_at + config.move_gap_s


def with_place(instances: Sequence[InstanceView], now: Seconds, config: CoreConfig) -> list[InstanceView]:
    """Name the instances that would run one more request now."""
    return [i for i in instances if load_of(i) < i.max_running and has_room(i, now, config)]


def may_take(instance: InstanceView, request: RunningView) -> bool:
    """Whether an instance with a place free may take a request that moves: its node holds the adapter, and it takes one
    that brings tokens at a time."""
    if not instance.node.holds(request.info.adapter_digest):
        return False
    brings_tokens = request.has_token or request.num_kept > 0.0
    return not (brings_tokens and any(r.num_kept > 0.0 and not r.has_token for r in instance.in_flight.values()))


def best_place(free: Sequence[InstanceView], request: RunningView) -> InstanceView | None:
    """Of instances with a place free the best for a request that moves. Ties go to smaller ids."""
    able = [i for i in free if may_take(i, request)]
    return min(able, key=lambda i: (load_of(i) / i.max_running - affinity(i, request), i.instance_id), default=None)


def move(instances: Sequence[InstanceView], now: Seconds, config: CoreConfig) -> Move | None:
    """Name the next move, or None when no place stands free while somebody waits elsewhere."""
    free = with_place(instances, now, config)
    if not free:
        return None
    for source in sorted(instances, key=lambda i: (i.max_running - load_of(i), i.instance_id)):
        if load_of(source) <= source.max_running or not source.is_acknowledged:
            break
        waiting = [r for r in source.in_flight.values() if not r.has_token and may_move(r, now, config)]
        for request in sorted(waiting, key=lambda r: -r.order):
            target = best_place(free, request)
            if target is not None:
                held = f"{load_of(source)} requests for {source.max_running} places on {source.instance_id}"
                return Move(request, source.instance_id, target.instance_id, f"{held}, {target.instance_id} has one")
    return None

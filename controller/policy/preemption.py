"""Who gives up a place when a stricter class would be late: running answers of looser classes, for a while. Pure.

The preempted answer stays in its engine, which keeps its tokens and, as memory allows, its KV; it goes on by itself as
soon as a place comes free, token for token. Nobody is preempted
- for a request of its own class or a looser one, for one that can still be in time without it, or for one that is late;
- while places come free soon enough by themselves;
- before its first token, with a promised pace, or with a deadline near;
- more than `max_preemptions` times, and while one has waited `preempted_wait_s` nothing new is sent to its instance.
So a preempted answer goes on within that time plus the time until a place comes free, however much is urgent.
Source: [qlm] request eviction; the bounds are ours.
"""

from collections.abc import Iterable

from nearline.controller.config import CoreConfig, target_s
from nearline.controller.policy.agreement import rank
from nearline.controller.policy.lateness import MAX_LEAD
from nearline.controller.policy.views import InstanceView, RunningView
from nearline.controller.policy.waiting import Wait
from nearline.protocol import Seconds

QUANTILE = 0.9
_FRACTION_UNKNOWN = 0.5
"""Part of its target that a request waits before others give way, while nothing is known of waits."""


def at_risk_at(due_at: Seconds, target: Seconds, wait: Wait | None) -> Seconds:
    """Say when a waiting request will be late unless somebody gives way: its target less a wait it may well have."""
    return due_at - (_FRACTION_UNKNOWN * target if wait is None else min(wait.quantile_s(QUANTILE), target))


def is_soon(target: Seconds, wait: Wait | None) -> bool:
    """Whether the next place comes free soon enough for whoever is next; what a preemption makes an engine compute
    again would then cost others more than it brings."""
    return wait is not None and wait.quantile_s(QUANTILE) <= MAX_LEAD * target


def victim(
    instances: Iterable[InstanceView], urgent: RunningView, service_s: Seconds, now: Seconds, config: CoreConfig
) -> RunningView | None:
    """Choose who gives way to `urgent`: the loosest class, then the least often preempted, then the last to come."""
    strictness = rank(urgent.info.slo.slo_class)
    best: tuple[int, int, int] | None = None
    chosen: RunningView | None = None
    for instance in instances:
        if not instance.is_usable or is_reserved(instance, now, config):
            continue
        if not instance.node.holds(urgent.info.adapter_digest):
            continue
        for running in instance.in_flight.values():
            if not _may_be_preempted(running, strictness, service_s, now, config):
                continue
            order = (-rank(running.info.slo.slo_class), running.num_preemptions, -running.order)
            if best is None or order < best:
                best, chosen = order, running
    return chosen


def is_reserved(instance: InstanceView, now: Seconds, config: CoreConfig) -> bool:
    """Whether the next place of an instance belongs to an answer that was preempted long enough ago."""
    if not instance.num_preempted:
        return False
    return any(is_overdue(running, now, config) for running in instance.in_flight.values())


def is_overdue(running: RunningView, now: Seconds, config: CoreConfig) -> bool:
    """Whether a preempted answer has waited its time."""
    return running.preempted_at is not None and now >= running.preempted_at + preempted_wait_s(running, config)


def preempted_wait_s(running: RunningView, config: CoreConfig) -> Seconds:
    """Longest time a preempted answer waits before nothing new goes before it: part of its class's target."""
    return config.max_wait_fraction * min(target_s(running.info.slo), config.max_preempted_target_s)


def _may_be_preempted(
    running: RunningView, strictness: int, service_s: Seconds, now: Seconds, config: CoreConfig
) -> bool:
    if rank(running.info.slo.slo_class) <= strictness or not running.has_token or running.preempted_at is not None:
        return False
    if running.num_preemptions >= config.max_preemptions or running.info.slo.tpot_s is not None:
        return False
    deadline = running.deadline
    return deadline is None or deadline - now > 2.0 * (service_s + preempted_wait_s(running, config))

"""Whether to wait for a slot near the bytes instead of reading them again somewhere else. Pure.

Starting at once on any node that has a slot looks soonest to each model by itself. But a fleet that never waits works
from disk although its DRAM could hold everything, so a read is charged the two that it costs others: the one that
brings back what loses its room, now or later, and the one that waits behind it on the link. Where a slot on a node with
the bytes in DRAM is sooner than that, the model waits for it and asks for it as for any other: from its wait bound on
busy instances there drain for it, so it waits no longer than competing for one slot takes. Past its bound a place that
costs nobody anything, neither slot nor room, ends the wait. Ending it for any place after three bounds cost over 4
points of attainment under overload (benchmarks/evidence/composed.py, conversation at 1.5, seeds 3 to 8).
Source: [serverlessllm] compares nodes by start-up time only; our own simulation (benchmarks/evidence/placement.md).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log

from nearline.controller.config import CoreConfig
from nearline.controller.estimate import startup, taken_s
from nearline.controller.policy.placement import Need, Placement
from nearline.controller.policy.scaling import residence_ends_at
from nearline.controller.policy.views import InstanceView, NodeView
from nearline.protocol import Digest, NodeId, Seconds, Tier

_MARGIN = 0.9
_READS_OF_OTHERS = 2.0


@dataclass(frozen=True, slots=True)
class Soon:
    """A slot on a node that has the bytes in DRAM should be free at `at`."""

    node_id: NodeId
    at: Seconds


def worth_waiting(
    nodes: Iterable[NodeView], need: Need, found: Placement, free_at: Callable[[InstanceView], Seconds], now: Seconds
) -> Soon | None:
    """Name the slot to wait for, or None if `found` is the best there is."""
    everywhere = list(nodes)
    near = [n for n in everywhere if n.is_connected and _has_in_dram(n, need.digest) and n.node_id not in need.avoid]
    if not near or found.node_id in [node.node_id for node in near]:
        return None
    best: Soon | None = None
    taken = sum(taken_s(n, need.digest, need.num_bytes) for n in everywhere if n.node_id == found.node_id)
    best_s = _MARGIN * found.estimate_s + _READS_OF_OTHERS * taken
    for node in near:
        at = min((free_at(instance) for instance in node.instances.values()), default=now)
        total_s = max(0.0, at - now) + startup(node, need.digest, need.num_bytes, now).total_s
        if total_s < best_s:
            best, best_s = Soon(node.node_id, at), total_s
    return best


def free_at(
    instance: InstanceView, now: Seconds, config: CoreConfig, max_wait_s: Seconds, bound_at: Seconds = float("inf")
) -> Seconds:
    """Estimate when an instance may leave its slot: idle by then and its residence over, or drained though busy from
    `bound_at` on, when the waiter has waited its bound."""
    if instance.is_stopping:
        return instance.stop_by if instance.in_flight else now + config.stop_s
    model = instance.model
    if model.num_live <= model.spec.min_replicas:
        return float("inf")
    num_running, ends_at = len(instance.in_flight), residence_ends_at(instance, config, max_wait_s)
    drain_s = model.service_s * (1.0 + log(num_running)) if num_running else 0.0
    drained_at = max(now, bound_at, ends_at) + min(drain_s, config.swap_drain_s)
    idle_at = float("inf") if model.queue.num_waiting else max(now + drain_s, ends_at)
    return min(idle_at, drained_at) + config.stop_s


def _has_in_dram(node: NodeView, digest: Digest) -> bool:
    row = node.residency.get(digest)
    return row is not None and row.dram_bytes >= row.num_bytes and node.bandwidth(Tier.DRAM) > 0

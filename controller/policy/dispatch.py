"""Which instance gets a request. Pure.

1. Only instances that are ready, have a place left and can get at the request's adapter.
2. A request that saw crashes without a token is sent alone, to an idle instance, so that it can only fail itself.
3. The least loaded one; an instance that knows the adapter or the prompt's prefix may be a quarter fuller.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nearline.controller.config import CoreConfig
from nearline.controller.policy.views import InstanceView, RequestView
from nearline.protocol import InstanceId

AFFINITY = 0.25
"""How much fuller (as a part of its places) an instance may be and still be preferred for what it already knows."""


@dataclass(frozen=True, slots=True)
class Choice:
    instance_id: InstanceId
    reason: str


def choose(instances: Iterable[InstanceView], request: RequestView, config: CoreConfig) -> Choice | None:
    """Choose an instance for a request, or None if it must wait. Ties go to the smaller id."""
    best: tuple[float, InstanceId] | None = None
    reason = ""
    for instance in instances:
        if not has_room(instance, config) or not instance.node.holds(request.info.adapter_digest):
            continue
        if is_suspect(request, config) and instance.in_flight:
            continue
        knows = _known(instance, request)
        load = len(instance.in_flight) / instance.max_running
        rank = (load - AFFINITY * len(knows), instance.instance_id)
        if best is None or rank < best:
            best = rank
            reason = f"{len(instance.in_flight)} of {instance.max_running} places taken"
            reason += f", knows its {' and '.join(knows)}" if knows else ""
    return None if best is None else Choice(best[1], reason)


def has_room(instance: InstanceView, config: CoreConfig) -> bool:
    """Whether an instance may be sent anything: one that tests a suspect is left alone until a token comes."""
    if not instance.is_usable or len(instance.in_flight) >= instance.max_running + config.dispatch_headroom:
        return False
    num_fruitless = config.max_fruitless_losses - 1
    for request in instance.in_flight.values():  # every request of every decision passes here: no calls
        if request.num_fruitless >= num_fruitless and not request.has_token:
            return False
    return True


def is_suspect(request: RequestView, config: CoreConfig) -> bool:
    """Whether one more crash would make this request the cause of it."""
    return request.num_fruitless >= config.max_fruitless_losses - 1


def _known(instance: InstanceView, request: RequestView) -> list[str]:
    known = []
    if request.info.adapter_digest is not None and request.info.adapter_digest in instance.adapters:
        known.append("adapter")
    if request.info.prefix_hash and request.info.prefix_hash in instance.prefixes:
        known.append("prefix")
    return known

"""Which instance gets a request. Pure.

1. Only instances that are ready, have a place left and can get at the request's adapter.
2. A request that saw crashes without a token is sent alone, to an idle instance, so that it can only fail itself.
3. The least loaded one; an instance that knows the adapter or the prompt's prefix may be a quarter fuller, one that is
   home to the adapter (policy/adapters.py) an eighth.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nearline.controller.config import CoreConfig
from nearline.controller.events import RequestInfo
from nearline.controller.policy.agreement import rank
from nearline.controller.policy.preemption import is_reserved
from nearline.controller.policy.views import InstanceView, RequestView
from nearline.protocol import InstanceId, Seconds

CLASS_STEP = 10_000
"""Between the classes' priorities in an engine; callers ask for -1000 to 1000."""
AFFINITY = 0.25
"""How much fuller (as a part of its places) an instance may be and still be preferred for what it already knows."""


@dataclass(frozen=True, slots=True)
class Choice:
    instance_id: InstanceId
    reason: str


def choose(roomy: Iterable[InstanceView], request: RequestView, config: CoreConfig) -> Choice | None:
    """Choose among instances that have room, or None if the request must wait. Ties go to the smaller id."""
    best: tuple[float, InstanceId] | None = None
    chosen: InstanceView | None = None
    for instance in roomy:
        if not instance.node.holds(request.info.adapter_digest):
            continue
        if instance.in_flight and is_suspect(request, config):
            continue
        load = load_of(instance) / instance.max_running
        rank = (load - affinity(instance, request), instance.instance_id)
        if best is None or rank < best:
            best, chosen = rank, instance
    if chosen is None:
        return None
    reason = f"{load_of(chosen)} of {chosen.max_running} places taken{_why(chosen, request)}"
    return Choice(chosen.instance_id, reason)


def load_of(instance: InstanceView) -> int:
    """Requests that hold or want a place of an instance: those preempted there wait until one comes free."""
    return len(instance.in_flight) - instance.num_preempted


def has_room(instance: InstanceView, now: Seconds, config: CoreConfig) -> bool:
    """Whether an instance may be sent anything: one that tests a suspect is left alone until a token comes, and one
    whose next place belongs to an answer preempted long ago until that goes on."""
    if not instance.is_usable or load_of(instance) >= instance.max_running + config.dispatch_headroom:
        return False
    if is_reserved(instance, now, config):
        return False
    num_fruitless = config.max_fruitless_losses - 1
    for request in instance.in_flight.values():  # every request of every decision passes here: no calls
        if request.num_fruitless >= num_fruitless and not request.has_token:
            return False
    return True


def is_suspect(request: RequestView, config: CoreConfig) -> bool:
    """Whether one more crash would make this request the cause of it."""
    return request.num_fruitless >= config.max_fruitless_losses - 1


def affinity(instance: InstanceView, request: RequestView) -> float:
    """How much fuller, as a part of its places, an instance may be for what it knows of a request."""
    info = request.info
    if info.adapter_digest is None and not info.prefix_hash:
        return 0.0
    is_home = info.adapter_digest in instance.homes
    return AFFINITY * len(_known(instance, request)) + (AFFINITY / 2 if is_home else 0.0)


def _why(instance: InstanceView, request: RequestView) -> str:
    if request.info.adapter_digest is None and not request.info.prefix_hash:
        return ""
    knows = _known(instance, request)
    reason = f", knows its {' and '.join(knows)}" if knows else ""
    return reason + (", home to its adapter" if request.info.adapter_digest in instance.homes else "")


def _known(instance: InstanceView, request: RequestView) -> list[str]:
    known = []
    if request.info.adapter_digest is not None and request.info.adapter_digest in instance.adapters:
        known.append("adapter")
    if request.info.prefix_hash and request.info.prefix_hash in instance.prefixes:
        known.append("prefix")
    return known


def engine_priority(info: RequestInfo) -> int:
    """Rank a request inside an engine: its class first, then what its caller asked for; smaller goes first."""
    return rank(info.slo.slo_class) * CLASS_STEP + info.priority

"""How many replicas a model should have, and which idle ones should go. Pure."""

from dataclasses import dataclass

from nearline.controller.config import CoreConfig
from nearline.controller.policy.keep_alive import Window
from nearline.controller.policy.views import InstanceView, ModelView
from nearline.protocol import Seconds


@dataclass(frozen=True, slots=True)
class Wanted:
    num_replicas: int
    reason: str


def wanted(model: ModelView, config: CoreConfig) -> Wanted:
    """Say how many replicas should serve or start now. Growth is one at a time: a start under way counts as help.

    1. A waiting request wants at least one. 2. A queue longer than what all replicas run at once wants one more,
    up to `max_replicas`, and so does waiting behind a traffic that keeps `demand_load` of them busy. 3. Never fewer
    than `min_replicas`. 4. Never fewer than there are: idle time and `has_spare` decide that.
    """
    live, waiting = model.num_live, model.queue.num_waiting
    floor = model.spec.min_replicas
    if waiting and live == 0:
        return Wanted(max(1, floor), f"{waiting} waiting, no replica")
    if live < floor:
        return Wanted(floor, f"{live} of at least {floor} replicas")
    replicas = [instance for instance in model.instances.values() if instance.is_live]
    is_growing = any(not instance.is_usable for instance in replicas)
    places = sum(instance.max_running for instance in replicas)
    if not is_growing and live < model.spec.max_replicas and waiting > config.scale_out_factor * places:
        return Wanted(live + 1, f"{waiting} waiting, {live} replicas run {places} at once")
    if not is_growing and waiting and live < model.spec.max_replicas:
        busy = model.demand.busy_places(model.service_s, model.demand.noted_at)
        if busy > config.demand_load * places:
            return Wanted(live + 1, f"traffic keeps {busy:.1f} of {places} places busy")
    return Wanted(live, "enough")


def expires_at(instance: InstanceView) -> Seconds | None:
    """When this instance has been idle for its model's keep-alive, or None if it stays: also while its steps are
    measured."""
    keep_alive_s = instance.model.spec.keep_alive_s
    if instance.idle_since is None or not instance.is_usable:
        return None
    if instance.model.is_retired:
        return instance.idle_since
    if keep_alive_s < 0 or instance.model.measurements or instance.model.num_live <= instance.model.spec.min_replicas:
        return None
    if instance.model.spec.keep_alive_min_s is not None:
        return _learned_end(instance, instance.idle_since, instance.model.spec.keep_alive_min_s)
    return instance.idle_since + keep_alive_s


def window(model: ModelView, start_s: Seconds) -> Window:
    """When after its last call an instance of a model with learned keep-alive should be there."""
    spec = model.spec
    return model.gaps.window(spec.keep_alive_min_s or 0.0, spec.keep_alive_s, start_s)


def _learned_end(instance: InstanceView, idle_since: Seconds, least_s: Seconds) -> Seconds:
    model, loaded_at = instance.model, instance.loaded_at
    found = window(model, 0.0 if loaded_at is None else loaded_at - instance.created_at)
    if not found.begin_s:
        return idle_since + found.end_s
    if model.quiet_since is not None and instance.created_at > model.quiet_since:  # it was prepared for a call
        return max(idle_since + least_s, model.quiet_since + found.end_s)
    return idle_since + least_s


def has_spare(model: ModelView, num_usable: int, now: Seconds, config: CoreConfig) -> bool:
    """Whether one replica fewer would do: nobody waits, nobody measures steps, and the others would not be busier than
    `scale_in_load`."""
    others = num_usable - 1
    if others < max(1, model.spec.min_replicas) or model.queue.num_waiting or model.measurements:
        return False
    places = min(i.max_running for i in model.instances.values() if i.is_usable) * others
    busy = max(float(model.num_running), model.demand.busy_places(model.service_s, now))
    return busy <= config.scale_in_load * places


def residence_ends_at(instance: InstanceView, config: CoreConfig, max_wait_s: Seconds) -> Seconds:
    """Until when an instance keeps its slot though another model waits: some multiple of what the swap costs, which
    is its start and, while it is busy, the time in which its batch runs empty before it leaves.

    Swapping then takes at most 1 / (1 + residence_factor) of a slot's time, and no waiter is held longer than its
    own wait bound `max_wait_s`.
    """
    if instance.loaded_at is None:
        return float("inf")
    swap_s = instance.loaded_at - instance.created_at
    if instance.in_flight:
        swap_s += min(config.swap_drain_s, instance.model.service_s)
    return instance.loaded_at + min(config.residence_factor * swap_s, max_wait_s)


def is_beside_replica(instance: InstanceView) -> bool | None:
    """Whether one replica of its model, and nobody else, is busy beside an instance on its device; None: others are."""
    node, index = instance.node, instance.spec.device_index
    busy = [i for i in node.instances.values() if i is not instance and i.spec.device_index == index and i.in_flight]
    if not busy:
        return False
    return True if len(busy) == 1 and busy[0].model is instance.model else None


def backoff_s(num_failures: int, config: CoreConfig) -> Seconds:
    """Pause before the next start after `num_failures` failed ones in a row."""
    return min(config.start_backoff_max_s, config.start_backoff_s * 2.0 ** (num_failures - 1))

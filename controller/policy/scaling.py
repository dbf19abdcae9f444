"""How many replicas a model should have, and which idle ones should go. Pure."""

from dataclasses import dataclass

from nearline.controller.config import CoreConfig
from nearline.controller.policy.views import InstanceView, ModelView
from nearline.protocol import Seconds


@dataclass(frozen=True, slots=True)
class Wanted:
    num_replicas: int
    reason: str


def wanted(model: ModelView, config: CoreConfig) -> Wanted:
    """Say how many replicas should serve or start now. Growth is one at a time: a start under way counts as help.

    1. A waiting request wants at least one. 2. A queue longer than what all replicas run at once wants one more,
    up to `max_replicas`. 3. Never fewer than `min_replicas`. 4. Never fewer than there are: idle time decides that.
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
    return Wanted(live, "enough")


def expires_at(instance: InstanceView) -> Seconds | None:
    """When this instance has been idle for its model's keep-alive, or None if it stays."""
    keep_alive_s = instance.model.spec.keep_alive_s
    if instance.idle_since is None or not instance.is_usable:
        return None
    if instance.model.is_retired:
        return instance.idle_since
    if keep_alive_s < 0 or instance.model.num_live <= instance.model.spec.min_replicas:
        return None
    return instance.idle_since + keep_alive_s


def residence_ends_at(instance: InstanceView, config: CoreConfig, max_wait_s: Seconds) -> Seconds:
    """Until when an instance keeps its slot though another model waits: some multiple of what its start cost.

    Swapping then takes at most 1 / (1 + residence_factor) of a slot's time, and no waiter is held longer than its
    own wait bound `max_wait_s`.
    """
    if instance.loaded_at is None:
        return float("inf")
    start_s = instance.loaded_at - instance.created_at
    return instance.loaded_at + min(config.residence_factor * start_s, max_wait_s)


def backoff_s(num_failures: int, config: CoreConfig) -> Seconds:
    """Pause before the next start after `num_failures` failed ones in a row."""
    return min(config.start_backoff_max_s, config.start_backoff_s * 2.0 ** (num_failures - 1))

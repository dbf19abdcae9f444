"""Which instances are home to which adapters, and which of these they are asked to read ahead. Pure.

An adapter is read when its first request comes to an instance, and that request pays for it. So a home is asked to read
what is called often before it is called there: when homes change, and when an instance has its last byte; never before
that, never ahead of a request, and the engine does it only in a free place while it has nothing else to read. An
instance that starts because requests of adapters wait is asked for theirs with its start.
"""

from collections import ChainMap

from nearline.controller.actions import PrepareAdapter
from nearline.controller.agenda import Agenda
from nearline.controller.config import CoreConfig
from nearline.controller.policy import adapters
from nearline.controller.state import Fleet, InstanceRecord, ModelRecord
from nearline.protocol import Digest, Seconds


class HomeDesk:
    """Keeps nothing of its own: homes stand in the instances' records, and what they were asked for."""

    def __init__(self, fleet: Fleet, config: CoreConfig, agenda: Agenda) -> None:
        self._fleet = fleet
        self._config = config
        self._agenda = agenda

    def settle(self, model: ModelRecord, now: Seconds) -> None:
        """Choose which instances are home to which adapters: at intervals, and when either come or go."""
        traffic = model.traffic.expected(now)
        if not traffic:
            return
        usable = [instance for instance in model.instances.values() if instance.is_usable]
        chosen_for = tuple(instance.instance_id for instance in usable), len(traffic)
        if chosen_for == model.homes_for and now < model.homes_due:
            return
        model.homes_for, model.homes_due = chosen_for, now + self._config.adapter_homes_s
        model.prepare_due = now
        places = [adapters.Home(i.instance_id, i.max_running, {**i.adapters, **i.homes}) for i in usable]
        for instance_id, homes in adapters.homes(traffic, places).items():
            self._fleet.instances[instance_id].homes = homes

    def prepare(self, model: ModelRecord, now: Seconds) -> None:
        """Ask instances that have all their bytes for the adapters they should read before anybody calls them, and
        instances that start for those of the requests that wait."""
        traffic = model.traffic.expected(now)
        if not traffic and model.prepared_for:
            model.prepared_for = ()
            for instance in model.instances.values():
                instance.prepared.clear()
        if not traffic or not self._config.max_prepared_adapters:
            return
        if model.queue.num_waiting:
            for instance in model.instances.values():
                if instance.ready_at is None and not instance.is_stopping:
                    self._ask_for_waiting(instance)
        able = [i for i in model.instances.values() if i.is_usable and i.loaded_at is not None]
        names = tuple(instance.instance_id for instance in able)
        if names == model.prepared_for and now < model.prepare_due:
            return
        if len(model.instances) > 1:
            self.settle(model, now)
        model.prepared_for, model.prepare_due = names, now + self._config.adapter_homes_s
        least = self._config.min_prepared_traffic
        for instance in able:
            instance.prepared = {digest: None for digest in instance.prepared if digest in traffic}
            at_home = instance.homes if len(model.instances) > 1 else traffic
            known = ChainMap(instance.prepared, instance.adapters)
            chosen = adapters.to_prepare(traffic, at_home, known, instance.max_running, least)
            for digest in chosen[: self._config.max_prepared_adapters]:
                self._ask(instance, digest, f"{traffic[digest]:.1f} requests of late have it at home here")

    def _ask_for_waiting(self, instance: InstanceRecord) -> None:
        if len(instance.prepared) >= self._config.max_prepared_adapters:
            return
        waiting = dict.fromkeys(group.key.adapter_digest for group in instance.model.queue.ordered_groups())
        for digest in list(waiting)[: self._config.max_prepared_adapters]:
            if digest is not None and digest not in instance.prepared:
                self._ask(instance, digest, "a request of it waits for this start")

    def _ask(self, instance: InstanceRecord, digest: Digest, reason: str) -> None:
        if instance.node.holds(digest):
            instance.prepared[digest] = None
            self._agenda.do(PrepareAdapter(instance.instance_id, instance.node.node_id, digest, reason))

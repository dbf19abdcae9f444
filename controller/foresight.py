"""What should be ready before it is asked for, and what is no longer needed. Pure.

- A model that will get a slot soon has its bytes brought into DRAM meanwhile, where nobody else needs the room.
- A quiet model with learned keep-alive is prepared shortly before its next call is expected: on a slot that stands
  free, else in DRAM only. Nothing is ever stopped for a forecast.
- A replica that the traffic no longer needs goes after `scale_in_s`, whether it is idle or not: it drains.
"""

from nearline.controller.actions import Preload
from nearline.controller.agenda import Agenda
from nearline.controller.capacity import CapacityDesk
from nearline.controller.config import CoreConfig
from nearline.controller.estimate import bytes_by_tier, startup
from nearline.controller.machines import MachineDesk
from nearline.controller.policy import scaling
from nearline.controller.state import Fleet, ModelRecord, NodeRecord
from nearline.protocol import Seconds

_LOOK_AHEAD = 4


class ForesightDesk:
    """Keeps nothing of its own but timers: `forecast` and `spare`, one of each per model."""

    def __init__(
        self, fleet: Fleet, config: CoreConfig, agenda: Agenda, machines: MachineDesk, capacity: CapacityDesk
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._agenda = agenda
        self._machines = machines
        self._capacity = capacity

    def consider(self, model: ModelRecord, now: Seconds) -> None:
        """Look at a model after something happened to it."""
        if len(model.instances) > 1 or model.spare_since is not None:
            self._look_for_spare(model, now)
        if model.spec.keep_alive_min_s is not None and model.quiet_since is not None and not model.instances:
            begin_s = scaling.window(model, model.last_start_s).begin_s
            if begin_s > 0 and model.quiet_since + begin_s > now:
                self._agenda.timers.set(("forecast", model.name), model.quiet_since + begin_s)

    def forecast_came(self, model: ModelRecord, now: Seconds) -> None:
        """Prepare a model that is still quiet for the call that should come soon."""
        if model.quiet_since is None or model.instances or model.is_retired:
            return
        reason = f"quiet for {now - model.quiet_since:.0f} s, and its gaps say that a call comes soon"
        if not self._capacity.prepare(model, reason, now):
            self._preload(model, reason, now)

    def look_ahead(self, now: Seconds) -> None:
        """Bring the bytes of models that wait for a slot into DRAM."""
        for model in self._capacity.waiting[:_LOOK_AHEAD]:
            if model.starved_since is not None and model.preloading_on is None:
                self._preload(model, "it gets a slot soon", now)

    def _preload(self, model: ModelRecord, reason: str, now: Seconds) -> None:
        """Read what no node has in DRAM on the node that is quickest, if its link is idle and its DRAM has room."""
        holders = [n for n in self._fleet.nodes.values() if n.is_connected and n.holds(model.digest)]
        missing = {n.node_id: sum(bytes_by_tier(n, model.digest, model.num_bytes)[1:]) for n in holders}
        if not holders or not all(missing.values()):
            return
        able = [n for n in holders if n.storage_free_at <= now and n.report.dram_free_bytes >= missing[n.node_id]]
        if not able:
            return

        def rank(node: NodeRecord) -> tuple[Seconds, str]:
            return startup(node, model.digest, model.num_bytes, now).total_s, node.node_id

        node = min(able, key=rank)
        node.storage_free_at = now + startup(node, model.digest, model.num_bytes, now).read_s
        model.preloading_on = node.node_id
        self._agenda.do(Preload(node.node_id, model.digest, f"{model.spec.model_id}: {reason}"))

    def _look_for_spare(self, model: ModelRecord, now: Seconds) -> None:
        key = ("spare", model.name)
        usable = [i for i in model.instances.values() if i.is_usable]
        if not scaling.has_spare(model, len(usable), now, self._config):
            model.spare_since = None
            self._agenda.timers.drop(key)
        elif model.spare_since is None:
            model.spare_since = now
            self._agenda.timers.set(key, now + self._config.scale_in_s)
        elif now >= model.spare_since + self._config.scale_in_s:
            model.spare_since = None
            spare = min(usable, key=lambda i: (len(i.in_flight), -i.created_at, i.instance_id))
            reason = f"{len(usable) - 1} replicas have been enough for {self._config.scale_in_s:g} s"
            self._machines.stop(spare, self._config.stop_drain_s, reason, now)

"""What nodes and instances tell the controller, and what that means for the fleet. Pure.

A node's report is its whole truth. Instances it reports that nobody here knows are adopted or stopped; instances it
should have and does not report are lost, unless the wish for them may not have reached it yet.
"""

from nearline.controller.actions import EnsureInstance, StopInstance
from nearline.controller.agenda import Agenda
from nearline.controller.config import CoreConfig
from nearline.controller.policy.scaling import backoff_s
from nearline.controller.requests import RequestDesk
from nearline.controller.state import ENDED, Fleet, InstanceRecord, ModelRecord, NodeRecord
from nearline.protocol import (
    CheckpointInfo,
    CheckpointKind,
    InstanceId,
    InstanceSpec,
    InstanceState,
    InstanceStatus,
    ModelSpec,
    NodeId,
    NodeReport,
    Seconds,
)
from nearline.protocol.errors import ErrorInfo, InstanceFailed, InvalidRequest, NodeLost


class MachineDesk:
    """Owns every NodeRecord and InstanceRecord."""

    def __init__(self, fleet: Fleet, config: CoreConfig, agenda: Agenda, requests: RequestDesk) -> None:
        self._fleet = fleet
        self._config = config
        self._agenda = agenda
        self._requests = requests

    def joined(self, report: NodeReport, now: Seconds) -> None:
        """Begin a link: what ran over an earlier one is void, wishes that may have been lost with it are repeated."""
        node = self._fleet.nodes.get(report.node_id)
        if node is None:
            node = self._fleet.nodes[report.node_id] = NodeRecord(report)
        self._void(node, now)
        node.is_connected = True
        self._agenda.timers.drop(("node", node.node_id))
        self.reported(report, now)
        reported = {status.instance_id: status for status in report.instances}
        for instance in node.instances.values():
            status = reported.get(instance.instance_id)
            if status is None:
                args = (instance.spec, node.node_id, instance.estimate_s)
                self._agenda.do(EnsureInstance(*args, "the link broke before the node confirmed it"))
            elif instance.is_stopping and status.state is not InstanceState.DRAINING:
                self._repeat_stop(instance, max(0.0, instance.stop_by - now))

    def reported(self, report: NodeReport, now: Seconds) -> None:
        """Replace what is known of a node by its report."""
        node = self._fleet.nodes.get(report.node_id)
        if node is None:
            return
        node.apply(report)
        self._agenda.is_plan_due = True
        reported = {status.instance_id: None for status in report.instances}
        for instance in [i for i in node.instances.values() if i.instance_id not in reported]:
            if instance.is_acknowledged:
                error = ErrorInfo.of(NodeLost(f"node {node.node_id} no longer has instance {instance.instance_id}"))
                self._gone(instance, error, now, is_blamed=False)
            elif instance.is_stopping:
                self._gone(instance, None, now, is_blamed=False)
        for status in report.instances:
            self.instance_changed(report.node_id, status, now)

    def lost(self, node_id: NodeId, now: Seconds) -> None:
        """Void what ran over a broken link, and give the node `node_grace_s` to come back."""
        node = self._fleet.nodes.get(node_id)
        if node is not None and node.is_connected:
            node.is_connected = False
            self._void(node, now)
            self._agenda.timers.set(("node", node_id), now + self._config.node_grace_s)

    def grace_ended(self, node_id: NodeId, now: Seconds) -> None:
        """Forget a node that did not come back; its instances are lost."""
        node = self._fleet.nodes.get(node_id)
        if node is None or node.is_connected:
            return
        error = ErrorInfo.of(NodeLost(f"node {node_id} is gone"))
        for instance in list(node.instances.values()):
            self._gone(instance, error, now, is_blamed=False)
        for model in self._fleet.models.values():
            if model.preloading_on == node_id:
                model.preloading_on = None
        del self._fleet.nodes[node_id]
        self._agenda.is_plan_due = True

    def imported(self, node_id: NodeId, checkpoint: CheckpointInfo) -> None:
        node = self._fleet.nodes.get(node_id)
        if node is not None:
            node.imported(checkpoint)
            self._agenda.is_plan_due = True

    def instance_changed(self, node_id: NodeId, status: InstanceStatus, now: Seconds) -> None:
        """Follow an instance's state."""
        node, instance = self._fleet.nodes.get(node_id), self._fleet.instances.get(status.instance_id)
        if node is None or (instance is not None and instance.node is not node):
            return
        if instance is None:
            if status.state in ENDED:
                return
            instance = self._adopt(node, status, now)
        if status.state in ENDED:
            self._gone(instance, status.error, now, is_blamed=True)
            return
        instance.apply(status)
        if status.state is InstanceState.READY and instance.ready_at is None:
            instance.ready_at = instance.idle_since = now
            self._agenda.is_plan_due = True
        if status.state is InstanceState.READY and instance.model.digest in node.profiles:
            instance.model.expect(node.profiles[instance.model.digest], instance.max_running)
        if status.timings is not None and instance.loaded_at is None:
            self._loaded(instance, now)
        if status.state is InstanceState.DRAINING and not instance.is_stopping:
            self._mark_stopping(instance, self._config.stop_drain_s, now)
        self._agenda.touch(instance.model)

    def ensure(self, model: ModelRecord, node: NodeRecord, spec: InstanceSpec, now: Seconds) -> InstanceRecord:
        """Note a new instance that the node is about to be asked for."""
        instance = InstanceRecord(spec, node, model, now)
        self._fleet.add_instance(instance)
        model.refresh(now)
        return instance

    def stop(self, instance: InstanceRecord, drain_s: Seconds, reason: str, now: Seconds) -> None:
        """Ask for the end of an instance; from now on it gets no new request."""
        self._mark_stopping(instance, drain_s, now)
        self._agenda.do(StopInstance(instance.instance_id, instance.node.node_id, drain_s, reason))

    def stop_overdue(self, instance_id: InstanceId, now: Seconds) -> None:
        """Ask again, without patience, for the end of an instance that should be gone."""
        instance = self._fleet.instances.get(instance_id)
        if instance is None:
            return
        self._agenda.timers.set(("stop", instance_id), now + self._config.stop_timeout_s)
        if instance.node.is_connected:
            self._repeat_stop(instance, 0.0)

    def _repeat_stop(self, instance: InstanceRecord, drain_s: Seconds) -> None:
        args = (instance.instance_id, instance.node.node_id, drain_s)
        self._agenda.do(StopInstance(*args, "it was asked to stop before and still exists"))

    def _void(self, node: NodeRecord, now: Seconds) -> None:
        error = ErrorInfo.of(NodeLost(f"the link to node {node.node_id} broke"))
        for instance in node.instances.values():
            self._requests.instance_lost(instance, False, error, now)
            self._agenda.touch(instance.model)

    def _mark_stopping(self, instance: InstanceRecord, drain_s: Seconds, now: Seconds) -> None:
        instance.is_stopping = True
        instance.stop_by = now + drain_s
        self._agenda.timers.set(("stop", instance.instance_id), instance.stop_by + self._config.stop_timeout_s)
        self._agenda.timers.drop(("idle", instance.instance_id))
        instance.model.refresh(now)
        self._agenda.touch(instance.model)

    def _loaded(self, instance: InstanceRecord, now: Seconds) -> None:
        """Its start is over: all bytes are there. The storage link is free once that is so for every instance."""
        instance.loaded_at = now
        node, model = instance.node, instance.model
        if all(other.loaded_at is not None for other in node.instances.values()):
            node.storage_free_at = min(node.storage_free_at, now)
        model.num_start_failures, model.retry_at = 0, 0.0
        model.last_places, model.last_start_s = instance.max_running, now - instance.created_at
        model.failed_nodes.clear()
        self._agenda.is_plan_due = True

    def _gone(self, instance: InstanceRecord, error: ErrorInfo | None, now: Seconds, *, is_blamed: bool) -> None:
        """Forget an instance. A start that failed counts against its model; a crash against what it was running."""
        model, is_planned = instance.model, instance.is_stopping
        is_lack_of_bytes = instance.loaded_at is None and not _is_crash(error)
        is_failed_start = instance.ready_at is None or not instance.has_worked or is_lack_of_bytes
        instance.is_stopping = True
        self._requests.instance_lost(instance, is_blamed and not is_planned and not is_lack_of_bytes, error, now)
        self._fleet.drop_instance(instance)
        for kind in ("idle", "stop"):
            self._agenda.timers.drop((kind, instance.instance_id))
        if is_blamed and not is_planned and is_failed_start:
            self._start_failed(model, instance, error, now)
        model.refresh(now)
        self._agenda.touch(model)
        self._agenda.is_plan_due = True

    def _start_failed(
        self, model: ModelRecord, instance: InstanceRecord, error: ErrorInfo | None, now: Seconds
    ) -> None:
        """Back off; after enough failures in a row give the waiting requests the instance's error.

        The next request then gets one try of its own, and its answer, instead of a model that is broken for ever.
        """
        if error is None:
            error = ErrorInfo.of(InstanceFailed(f"instance {instance.instance_id} stopped while it was starting"))
        model.num_start_failures += 1
        model.retry_at = now + backoff_s(model.num_start_failures, self._config)
        model.failed_nodes[instance.node.node_id] = None
        is_final = isinstance(error.exception(), InvalidRequest)
        if is_final or model.num_start_failures >= self._config.max_start_failures:
            model.num_start_failures = self._config.max_start_failures - 1
            if model.num_live == 0:
                self._requests.reject_waiting(model, error, "its model could not be started", now)

    def _adopt(self, node: NodeRecord, status: InstanceStatus, now: Seconds) -> InstanceRecord:
        """Take on an instance that an earlier controller started; stop it if nobody wants it."""
        model = self._fleet.models.get((status.model_id, status.digest))
        if model is None:
            model = _stranger(status)
            self._fleet.add_model(model)
        spec = InstanceSpec(status.instance_id, status.model_id, status.digest, status.device_index)
        instance = self.ensure(model, node, spec, now)
        self._agenda.touch(model)
        if model.num_live > max(1, model.spec.max_replicas):
            self.stop(instance, self._config.stop_drain_s, "one replica more than the model may have", now)
        return instance


def _is_crash(error: ErrorInfo | None) -> bool:
    """Whether a process ended for no reason that its node could name: what it ran may have killed it."""
    return error is None or isinstance(error.exception(), InstanceFailed)


def _stranger(status: InstanceStatus) -> ModelRecord:
    """A model version nobody registered, known only from an instance of it; it is retired and soon forgotten."""
    unknown = CheckpointInfo(
        digest=status.digest,
        kind=CheckpointKind.MODEL,
        num_bytes=0,
        family="",
        architecture="",
        source="",
        dtype="",
        files=(),
    )
    model = ModelRecord(ModelSpec(status.model_id, unknown, 0.0))
    model.retire()
    return model

"""What of a journal concerns one request: whom each event and action is about, and which are its story. Pure."""

from collections.abc import Sequence
from typing import NamedTuple, assert_never

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.protocol import FinishReason, InstanceId, RequestId

Item = happened.Event | do.Action


class Subject(NamedTuple):
    """Whom an event or action is about; neither: the fleet, a node, a name."""

    request_id: RequestId | None = None
    instance_id: InstanceId | None = None


def subject(item: Item) -> Subject:
    """Say whom an item is about."""
    match item:
        case do.Dispatch() | do.AbortSequence() | do.YieldPlace():
            return Subject(item.request_id, item.instance_id)
        case happened.RequestArrived(info):
            return Subject(info.request_id)
        case happened.RequestCancelled() | happened.RequestRejected() | happened.FirstToken():
            return Subject(item.request_id)
        case happened.SequenceEnded() | do.Reject():
            return Subject(item.request_id)
        case happened.InstanceChanged(_, status):
            return Subject(None, status.instance_id)
        case do.EnsureInstance(spec):
            return Subject(None, spec.instance_id)
        case do.StopInstance() | do.PrepareAdapter():
            return Subject(None, item.instance_id)
        case happened.ModelAdded() | happened.ModelRemoved() | happened.AdapterAdded() | happened.AdapterRemoved():
            return Subject()
        case happened.NodeJoined() | happened.NodeReported() | happened.NodeLost():
            return Subject()
        case happened.CheckpointImported() | happened.CopyFailed() | do.CopyCheckpoint() | do.DeleteCheckpoint():
            return Subject()
        case happened.MeasurementBegan() | happened.MeasurementEnded():
            return Subject()
        case do.Preload() | do.SolvePlan() | happened.PlanSolved() | do.WakeAt() | happened.Woke():
            return Subject()
        case _:
            assert_never(item)


class Concern:
    """What of each step concerns one request: its own events and actions, and what happened to instances it was sent
    to; starts and stops while it waits, since they are what it waits for. Fed step by step, in order."""

    def __init__(self, request_id: RequestId) -> None:
        self._request_id = request_id
        self._instances: dict[InstanceId, None] = {}
        self._is_open = False

    def of(self, event: happened.Event, actions: Sequence[do.Action]) -> list[Item]:
        found: list[Item] = []
        for item in (event, *actions):
            request_id, instance_id = subject(item)
            if request_id == self._request_id:
                self._is_open = not _is_end(item)
                if instance_id is not None:
                    self._instances[instance_id] = None
                found.append(item)
            elif self._is_open and request_id is None and instance_id is not None:
                is_known = item is not event or instance_id in self._instances
                found += [item] if is_known else []
        return found


def _is_end(item: Item) -> bool:
    if isinstance(item, happened.SequenceEnded):
        return item.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    return isinstance(item, (do.Reject, happened.RequestCancelled, happened.RequestRejected))

"""Who waits, and in which order: request groups and the virtual queue of one model. Pure.

A group is FIFO. A group that drains keeps its place, so requests that refill it are never unreachable and never
overtaken by a younger group. Lost requests come back to where their arrival puts them.
Source: [qlm] request groups and virtual queues; its public artifact forgets a drained group, ours does not.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from nearline.controller.config import target_s
from nearline.controller.events import RequestInfo
from nearline.protocol import Digest, InstanceId, ModelId, RequestId, Seconds, SloClass

LENGTH_BUCKET = 0
"""Every request is in one bucket of predicted length until there is a predictor."""


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Requests that are alike to the planner: same model version, adapter, SLO class and predicted length."""

    model_id: ModelId
    digest: Digest
    adapter_digest: Digest | None
    slo_class: SloClass
    length_bucket: int


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request from arrival to end. Waits in its group while `instance_id` is None, else runs there.

    `order` is its place among all arrivals; `num_fruitless` counts crashes in a row that it saw without a token.
    """

    info: RequestInfo
    digest: Digest
    order: int
    arrived_at: Seconds
    queued_at: Seconds
    attempt: int = 0
    instance_id: InstanceId | None = None
    dispatched_at: Seconds = 0.0
    has_token: bool = False
    num_losses: int = 0
    num_fruitless: int = 0

    @property
    def due_at(self) -> Seconds:
        """When its first token is due."""
        return self.arrived_at + target_s(self.info.slo)

    @property
    def deadline(self) -> Seconds | None:
        return None if self.info.slo.deadline_s is None else self.arrived_at + self.info.slo.deadline_s

    @property
    def group_key(self) -> GroupKey:
        info = self.info
        return GroupKey(info.model_id, self.digest, info.adapter_digest, info.slo.slo_class, LENGTH_BUCKET)


@dataclass(slots=True, eq=False)
class RequestGroup:
    """Waiting requests of one key, oldest arrival first. `place` is the group's rank in its queue, for ever."""

    key: GroupKey
    place: int
    waiting: OrderedDict[RequestId, RequestRecord] = field(default_factory=OrderedDict)

    def head(self) -> RequestRecord:
        return next(iter(self.waiting.values()))

    def add(self, request: RequestRecord) -> None:
        """Append a new arrival, or put a returning request back where its arrival belongs."""
        is_last = not self.waiting or next(reversed(self.waiting.values())).order < request.order
        self.waiting[request.info.request_id] = request
        if is_last:
            return
        if request.order < self.head().order:
            self.waiting.move_to_end(request.info.request_id, last=False)
            return
        self.waiting = OrderedDict(sorted(self.waiting.items(), key=lambda item: item[1].order))


class VirtualQueue:
    """The groups that wait for one model version."""

    def __init__(self) -> None:
        self.groups: dict[GroupKey, RequestGroup] = {}
        self.busy_groups: dict[GroupKey, RequestGroup] = {}
        self.num_waiting = 0
        self._num_places = 0

    def push(self, request: RequestRecord) -> None:
        group = self.groups.get(request.group_key)
        if group is None:
            group = self.groups[request.group_key] = RequestGroup(request.group_key, self._num_places)
            self._num_places += 1
        group.add(request)
        self.busy_groups[group.key] = group
        self.num_waiting += 1

    def has(self, request: RequestRecord) -> bool:
        group = self.busy_groups.get(request.group_key)
        return group is not None and request.info.request_id in group.waiting

    def remove(self, request: RequestRecord) -> None:
        """Take a waiting request out. Raises KeyError if it does not wait here."""
        group = self.groups[request.group_key]
        del group.waiting[request.info.request_id]
        self.num_waiting -= 1
        if not group.waiting:
            del self.busy_groups[group.key]

    def forget_adapter(self, digest: Digest) -> None:
        """Drop the empty groups of an adapter that is gone."""
        gone = [k for k, group in self.groups.items() if k.adapter_digest == digest and not group.waiting]
        for key in gone:
            del self.groups[key]

    def ordered_groups(self) -> list[RequestGroup]:
        """Groups with waiting requests, the one whose head is due first in front; ties keep the groups' places."""
        return sorted(self.busy_groups.values(), key=lambda group: (group.head().due_at, group.place))

    def shortest_target_s(self) -> Seconds:
        """The strictest promise among the heads of the waiting groups."""
        return min(target_s(group.head().info.slo) for group in self.busy_groups.values())

    def requests(self) -> list[RequestRecord]:
        """Everything that waits, in order of arrival."""
        found = [request for group in self.busy_groups.values() for request in group.waiting.values()]
        return sorted(found, key=lambda request: request.order)

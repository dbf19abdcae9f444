"""Who waits, and in which order: request groups and the virtual queue of one model. Pure.

Between SLO classes the one that is due first goes first; inside a class tenants share by virtual token counters;
inside a tenant the shortest predicted goes first, within a stated bound; and one tenant's requests of one group are
first in, first out. Requests that are late stand in groups of their own and are due a second time
(policy/lateness.py). A group that drains keeps its place, so requests that refill it are never unreachable. Lost
requests come back to where their arrival puts them.
Source: [qlm] request groups and virtual queues; its public artifact forgets a drained group, ours does not.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from nearline.controller.config import target_s
from nearline.controller.events import RequestInfo
from nearline.controller.policy.fairness import VirtualCounters
from nearline.controller.policy.lateness import SECOND_TARGETS, in_turn, is_too_late, late_from
from nearline.controller.policy.prediction import Features
from nearline.controller.policy.waiting import Wait
from nearline.protocol import Digest, InstanceId, ModelId, RequestId, Seconds, SloClass, TenantId


class GroupKey(NamedTuple):
    """Requests that are alike to the planner: same model version, adapter, SLO class and predicted length, all of
    them in time or none."""

    model_id: ModelId
    digest: Digest
    adapter_digest: Digest | None
    slo_class: SloClass
    length_bucket: int
    is_late: bool = False


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request from arrival to end. Waits in its group while `instance_id` is None, else runs there.

    `order` is its place among all arrivals; `num_fruitless` counts crashes in a row that it saw without a token.
    `predicted_tokens` and `length_bucket` stay as they were at its arrival, and so does `group_key` unless it becomes
    late: it waited until its first token could not be in time any more. `charged_tokens` are the output tokens its
    tenant was charged for (None: it never ran); `raw_wait` is what was expected at its arrival,
    before calibration. `preempted_at`: it gave its place in its instance to another then, and will go on there.
    `is_beside_replica`: the company it had on its device when its answer began (policy/scaling.py).
    `num_kept` estimates the tokens it brought into its present attempt, `held_s` sums the time that earlier ones ran.
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
    predicted_tokens: float = 0.0
    length_bucket: int = 0
    charged_tokens: float | None = None
    first_token_at: Seconds | None = None
    raw_wait: Wait | None = None
    known_key: GroupKey | None = None
    preempted_at: Seconds | None = None
    num_preemptions: int = 0
    num_moves: int = 0
    moved_at: Seconds | None = None
    num_kept: float = 0.0
    held_s: Seconds = 0.0
    is_late: bool = False
    is_beside_replica: bool | None = None

    @property
    def target_s(self) -> Seconds:
        return target_s(self.info.slo)

    @property
    def due_at(self) -> Seconds:
        """When its first token is due."""
        return self.arrived_at + target_s(self.info.slo)

    @property
    def next_due_at(self) -> Seconds:
        """The date it goes by now: once it is late, the second one."""
        return self.arrived_at + SECOND_TARGETS * self.target_s if self.is_late else self.due_at

    @property
    def features(self) -> Features:
        info = self.info
        return Features(info.tenant, info.adapter_digest, info.num_prompt_tokens, info.max_tokens)

    @property
    def deadline(self) -> Seconds | None:
        return None if self.info.slo.deadline_s is None else self.arrived_at + self.info.slo.deadline_s

    @property
    def group_key(self) -> GroupKey:
        if self.known_key is None:
            info, bucket = self.info, self.length_bucket
            alike = (info.model_id, self.digest, info.adapter_digest, info.slo.slo_class, bucket)
            self.known_key = GroupKey(*alike, self.is_late)
        return self.known_key

    def set_late(self, is_late: bool) -> None:
        """Note that it became late, or that it is not any more: it has a token. Only while it waits nowhere."""
        self.is_late, self.known_key = is_late, None


@dataclass(slots=True, eq=False)
class RequestGroup:
    """Waiting requests of one key, oldest arrival first, and each tenant's share of them as a line of its own.

    `place` is the group's rank in its queue, for ever.
    """

    key: GroupKey
    place: int
    waiting: OrderedDict[RequestId, RequestRecord] = field(default_factory=OrderedDict)
    lines: dict[TenantId, OrderedDict[RequestId, RequestRecord]] = field(default_factory=dict)

    def head(self) -> RequestRecord:
        return next(iter(self.waiting.values()))

    def heads(self) -> Iterator[tuple[TenantId, RequestRecord]]:
        """Yield the oldest request of every tenant that waits here."""
        for tenant, line in self.lines.items():
            yield tenant, next(iter(line.values()))

    def add(self, request: RequestRecord) -> None:
        """Append a new arrival, or put a returning request back where its arrival belongs."""
        tenant = request.info.tenant
        self.waiting = _inserted(self.waiting, request)
        self.lines[tenant] = _inserted(self.lines.get(tenant, OrderedDict()), request)

    def remove(self, request: RequestRecord) -> None:
        """Raises KeyError if it does not wait here."""
        tenant, request_id = request.info.tenant, request.info.request_id
        del self.waiting[request_id]
        del self.lines[tenant][request_id]
        if not self.lines[tenant]:
            del self.lines[tenant]


def _inserted(
    line: OrderedDict[RequestId, RequestRecord], request: RequestRecord
) -> OrderedDict[RequestId, RequestRecord]:
    """Put a request where its arrival belongs, nearly always the end."""
    is_last = not line or next(reversed(line.values())).order < request.order
    line[request.info.request_id] = request
    if is_last:
        return line
    if request.order < next(iter(line.values())).order:
        line.move_to_end(request.info.request_id, last=False)
        return line
    return OrderedDict(sorted(line.items(), key=lambda item: item[1].order))


class VirtualQueue:
    """The groups that wait for one model version, and what its tenants were served, class by class."""

    def __init__(self, weights: Mapping[TenantId, float] | None = None) -> None:
        self.groups: dict[GroupKey, RequestGroup] = {}
        self.busy_groups: dict[GroupKey, RequestGroup] = {}
        self.num_waiting = 0
        self.late_from: Seconds = float("inf")
        """Nobody who waits in time becomes late before."""
        self._num_places = 0
        self._counters = {slo_class: VirtualCounters(weights) for slo_class in SloClass}

    def counters(self, slo_class: SloClass) -> VirtualCounters:
        """The tenants' counters in one class; to be read by others, changed only here."""
        return self._counters[slo_class]

    def push(self, request: RequestRecord) -> None:
        self._join_group(request)
        self.num_waiting += 1
        self._counters[request.info.slo.slo_class].enter(request.info.tenant)
        if request.first_token_at is None and not request.is_late:
            self.late_from = min(self.late_from, late_from(request.due_at, request.target_s))

    def _join_group(self, request: RequestRecord) -> None:
        key = request.group_key
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = RequestGroup(key, self._num_places)
            self._num_places += 1
        group.add(request)
        self.busy_groups[key] = group

    def _leave_group(self, request: RequestRecord) -> None:
        group = self.groups[request.group_key]
        group.remove(request)
        if not group.waiting:
            del self.busy_groups[group.key]

    def has(self, request: RequestRecord) -> bool:
        group = self.busy_groups.get(request.group_key)
        return group is not None and request.info.request_id in group.waiting

    def remove(self, request: RequestRecord) -> None:
        """Take a waiting request out. Raises KeyError if it does not wait here."""
        self._leave_group(request)
        self.num_waiting -= 1
        self._counters[request.info.slo.slo_class].leave(request.info.tenant)

    def set_aside(self, lead_s: Seconds, now: Seconds) -> None:
        """Move those who cannot be in time any more, though they were the next, into the groups of the late ones."""
        self.late_from = float("inf")
        for group in [group for group in self.busy_groups.values() if not group.key.is_late]:
            for tenant in list(group.lines):
                self._set_aside(group, tenant, lead_s, now)

    def _set_aside(self, group: RequestGroup, tenant: TenantId, lead_s: Seconds, now: Seconds) -> None:
        late = []
        for request in group.lines[tenant].values():
            if request.first_token_at is not None:
                continue  # its promise is kept or broken already; those behind it are not
            if not is_too_late(request.due_at, request.target_s, lead_s, now):
                self.late_from = min(self.late_from, late_from(request.due_at, request.target_s))
                break
            late.append(request)
        for request in late:
            self._leave_group(request)
            request.set_late(True)
            self._join_group(request)

    def charge(self, request: RequestRecord) -> None:
        """Charge a request that begins to run: its prompt, and the answer that is expected of it; once in its life."""
        if request.charged_tokens is None:
            info, request.charged_tokens = request.info, request.predicted_tokens
            self._counters[info.slo.slo_class].charge(info.tenant, info.num_prompt_tokens, request.charged_tokens)

    def settle(self, request: RequestRecord, num_generated: int) -> None:
        """Correct the charge to what was generated, however often the request ran."""
        if request.charged_tokens is not None:
            info, missing = request.info, num_generated - request.charged_tokens
            self._counters[info.slo.slo_class].charge(info.tenant, 0, missing)
            request.charged_tokens = num_generated

    def forget_adapter(self, digest: Digest) -> None:
        """Drop the empty groups of an adapter that is gone."""
        gone = [k for k, group in self.groups.items() if k.adapter_digest == digest and not group.waiting]
        for key in gone:
            del self.groups[key]

    def ordered_groups(self) -> list[RequestGroup]:
        """Groups with waiting requests, the one whose head is due first in front; ties keep the groups' places."""
        return sorted(self.busy_groups.values(), key=lambda group: (group.head().next_due_at, group.place))

    def candidates(self, now: Seconds) -> Iterator[RequestRecord]:
        """Yield the head of every line in the order in which they should run; all others wait behind one of them."""
        if self.num_waiting == 1:
            yield next(iter(self.busy_groups.values())).head()
            return
        by_class: dict[SloClass, list[RequestGroup]] = {}
        for group in self.ordered_groups():
            by_class.setdefault(group.key.slo_class, []).append(group)
        for slo_class, groups in by_class.items():
            heads: dict[TenantId, list[RequestRecord]] = {}
            for group in groups:
                for tenant, head in group.heads():
                    heads.setdefault(tenant, []).append(head)
            for tenant in self._counters[slo_class].order(heads):
                yield from in_turn(heads[tenant], now)

    def ahead_of(self, request: RequestRecord) -> dict[int, float]:
        """Estimate how many requests of each length bucket run before a new one, if the queue were to stay as it is.

        All of classes that are due before it; of its own class those of its tenant that are late or not longer, and of
        each other tenant as many as its turns come to meanwhile.
        """
        ahead: dict[int, float] = {}
        if not self.num_waiting:
            return ahead
        slo_class, due_at, tenant = request.info.slo.slo_class, request.due_at, request.info.tenant
        totals: dict[TenantId, int] = {}
        own = [group for group in self.busy_groups.values() if group.key.slo_class is slo_class]
        for group in own:
            for name, line in group.lines.items():
                totals[name] = totals.get(name, 0) + len(line)
        turns = totals.get(tenant, 0) + 1
        for group in self.busy_groups.values():
            bucket, count = group.key.length_bucket, 0.0
            if group.key.slo_class is not slo_class:
                count = float(len(group.waiting)) if group.head().next_due_at <= due_at else 0.0
            else:
                for name, line in group.lines.items():
                    is_before = bucket <= request.length_bucket or group.key.is_late
                    share = float(is_before) if name == tenant else min(1.0, turns / totals[name])
                    count += share * len(line)
            if count:
                ahead[bucket] = ahead.get(bucket, 0.0) + count
        return ahead

    def shortest_target_s(self) -> Seconds:
        """The strictest promise among the heads of the waiting groups."""
        return min(target_s(group.head().info.slo) for group in self.busy_groups.values())

    def requests(self) -> list[RequestRecord]:
        """Everything that waits, in order of arrival."""
        found = [request for group in self.busy_groups.values() for request in group.waiting.values()]
        return sorted(found, key=lambda request: request.order)

"""The loop: a heap of (time, order, what happens) drives the very ControllerCore that runs live. Holds no policy."""

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from nearline.controller import ControllerCore, CoreConfig, Event, RequestInfo
from nearline.controller.actions import (
    AbortSequence,
    Action,
    Dispatch,
    EnsureInstance,
    Preload,
    Reject,
    StopInstance,
    WakeAt,
)
from nearline.controller.events import (
    FirstToken,
    InstanceChanged,
    ModelAdded,
    NodeJoined,
    NodeLost,
    RequestArrived,
    RequestCancelled,
    SequenceEnded,
    Woke,
)
from nearline.protocol import (
    FinishReason,
    InstanceId,
    InstanceState,
    ModelSpec,
    NodeId,
    RequestId,
    Seconds,
    Slo,
    TenantId,
    encode,
)
from nearline.simulator.arrivals import Arrival
from nearline.simulator.faults import Faults
from nearline.simulator.node import SimulatedNode, SimulatedSequence

_MAX_TOKENS = 1024
"""What simulated callers allow their answers; the true length is unknown to the core, as it is live."""


@dataclass(slots=True)
class Outcome:
    """What a run did. `ttft_s` is in order of first tokens; `served` counts weighted tokens per tenant ([vtc]: input +
    2 × output); `device_s` sums the time slots were held; `digest` condenses every action."""

    num_arrived: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_events: int = 0
    num_node_losses: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    ttft_s: list[Seconds] = field(default_factory=list)
    tpot_s: list[Seconds] = field(default_factory=list)
    e2e_s: list[Seconds] = field(default_factory=list)
    served: dict[TenantId, int] = field(default_factory=dict)
    device_s: Seconds = 0.0
    digest: str = ""


@dataclass(slots=True, eq=False)
class _Call:
    arrival: Arrival
    first_at: Seconds | None = None


class Simulation:
    """One run. Events of one instant happen in the order in which they were scheduled."""

    def __init__(
        self,
        config: CoreConfig,
        models: Iterable[ModelSpec],
        nodes: Iterable[SimulatedNode],
        faults: Faults | None = None,
    ) -> None:
        self.core = ControllerCore(config)
        self.outcome = Outcome()
        self.now: Seconds = 0.0
        self.nodes: dict[NodeId, SimulatedNode] = {node.node_id: node for node in nodes}
        self._heap: list[tuple[Seconds, int, Callable[[], None]]] = []
        self._order = 0
        self._has_more = False
        self._calls: dict[RequestId, _Call] = {}
        self._held_since: dict[InstanceId, tuple[NodeId, Seconds]] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self._faults = faults or Faults()
        self._patiences = self._faults.patiences()
        for model in models:
            self.post(ModelAdded(model))
        for node in self.nodes.values():
            node.connect(self.schedule, self.post)
            self.post(NodeJoined(node.report()))
        self._losses = self._faults.node_losses(sorted(self.nodes))
        self._schedule_loss()

    def schedule(self, delay_s: Seconds, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + max(0.0, delay_s), self._order, what))

    def post(self, event: Event) -> None:
        """Take an event through the core now, and let the nodes obey."""
        self._observe(event)
        self.outcome.num_events += 1
        for action in self.core.on(event, self.now):
            self._digest.update(encode(action))
            self._obey(action)

    def run(self, arrivals: Iterable[Arrival]) -> Outcome:
        """Run until every request has ended."""
        coming = iter(arrivals)
        self._schedule_next(coming)
        while self._heap and (self._calls or self._has_more):
            self.now, _, what = heapq.heappop(self._heap)
            what()
        for instance_id in list(self._held_since):
            self._let_go(instance_id)
        self.outcome.digest = self._digest.hexdigest()
        return self.outcome

    def _schedule_next(self, coming: Iterator[Arrival]) -> None:
        arrival = next(coming, None)
        self._has_more = arrival is not None
        if arrival is not None:
            self.schedule(arrival.at - self.now, lambda: self._arrive(arrival, coming))

    def _arrive(self, arrival: Arrival, coming: Iterator[Arrival]) -> None:
        self.outcome.num_arrived += 1
        request_id = RequestId(f"r{self.outcome.num_arrived}")
        self._calls[request_id] = _Call(arrival)
        self._schedule_next(coming)
        patience_s = next(self._patiences)
        if patience_s is not None:
            self.schedule(patience_s, lambda: self._hang_up(request_id))
        sizes = (arrival.num_prompt_tokens, max(arrival.num_output_tokens, _MAX_TOKENS))
        slo = Slo(arrival.slo_class)
        info = RequestInfo(request_id, arrival.model_id, *sizes, arrival.tenant, slo, prefix_hash=arrival.prefix_hash)
        self.post(RequestArrived(info))

    def _hang_up(self, request_id: RequestId) -> None:
        if self._calls.pop(request_id, None) is not None:
            self.outcome.num_cancelled += 1
            self.post(RequestCancelled(request_id))

    def _schedule_loss(self) -> None:
        loss = next(self._losses, None)
        if loss is not None:
            at, node_id = loss
            self.schedule(at - self.now, lambda: self._lose(self.nodes[node_id]))

    def _lose(self, node: SimulatedNode) -> None:
        """A machine is switched off, and back with nothing in memory after a while."""
        self._schedule_loss()
        if not node.is_up:
            return
        self.outcome.num_node_losses += 1
        for instance_id in [i for i, (node_id, _) in self._held_since.items() if node_id == node.node_id]:
            self._let_go(instance_id)
        node.die()
        self.post(NodeLost(node.node_id))
        self.schedule(self._faults.node_back_s, lambda: self._come_back(node))

    def _come_back(self, node: SimulatedNode) -> None:
        node.is_up = True
        self.post(NodeJoined(node.report()))

    def _observe(self, event: Event) -> None:
        if isinstance(event, FirstToken):
            call = self._calls.get(event.request_id)
            if call is not None and call.first_at is None:
                call.first_at = self.now
                self.outcome.ttft_s.append(self.now - call.arrival.at)
        elif isinstance(event, SequenceEnded) and event.finish_reason is FinishReason.STOP:
            self._finished(event.request_id)
        elif isinstance(event, InstanceChanged) and event.status.state is InstanceState.STOPPED:
            self._let_go(event.status.instance_id)

    def _finished(self, request_id: RequestId) -> None:
        call = self._calls.pop(request_id, None)
        if call is None:
            return  # its caller hung up in this very instant
        arrival, outcome = call.arrival, self.outcome
        outcome.num_finished += 1
        outcome.e2e_s.append(self.now - arrival.at)
        if arrival.num_output_tokens > 1 and call.first_at is not None:
            outcome.tpot_s.append((self.now - call.first_at) / (arrival.num_output_tokens - 1))
        service = arrival.num_prompt_tokens + 2 * arrival.num_output_tokens
        outcome.served[arrival.tenant] = outcome.served.get(arrival.tenant, 0) + service

    def _let_go(self, instance_id: InstanceId) -> None:
        held = self._held_since.pop(instance_id, None)
        if held is not None:
            self.outcome.device_s += self.now - held[1]

    def _obey(self, action: Action) -> None:
        match action:
            case Dispatch(request_id, instance_id, node_id, attempt):
                arrival = self._calls[request_id].arrival
                sizes = (arrival.num_prompt_tokens, arrival.num_output_tokens)
                sequence = SimulatedSequence(request_id, attempt, *sizes)
                self._later(lambda: self.nodes[node_id].submit(instance_id, sequence))
            case AbortSequence(request_id, instance_id, node_id):
                self._later(lambda: self.nodes[node_id].abort(instance_id, request_id))
            case EnsureInstance(spec, node_id):
                self._held_since[spec.instance_id] = (node_id, self.now)
                self._later(lambda: self.nodes[node_id].ensure(spec, self.now))
            case StopInstance(instance_id, node_id, drain_s):
                self._later(lambda: self.nodes[node_id].stop(instance_id, drain_s))
            case Preload(node_id, digest):
                self._later(lambda: self.nodes[node_id].preload(digest, self.now))
            case Reject(request_id, error):
                self.outcome.rejected[error.code] = self.outcome.rejected.get(error.code, 0) + 1
                del self._calls[request_id]
            case WakeAt(at):
                self.schedule(at - self.now, lambda: self.post(Woke()))
            case _:
                pass

    def _later(self, what: Callable[[], None]) -> None:
        """A frame on a link: it arrives at once, but after the event that caused it is done."""
        self.schedule(0.0, what)

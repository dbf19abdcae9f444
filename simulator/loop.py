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
from nearline.controller.events import FirstToken, ModelAdded, NodeJoined, RequestArrived, SequenceEnded, Woke
from nearline.protocol import FinishReason, ModelSpec, NodeId, RequestId, Seconds, encode
from nearline.simulator.arrivals import Arrival
from nearline.simulator.node import SimulatedNode, SimulatedSequence


@dataclass(slots=True)
class Outcome:
    """What a run did. `ttft_s` is in order of first tokens; `digest` condenses every action."""

    num_arrived: int = 0
    num_finished: int = 0
    num_events: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    ttft_s: list[Seconds] = field(default_factory=list)
    e2e_s: list[Seconds] = field(default_factory=list)
    digest: str = ""


class Simulation:
    """One run. Events of one instant happen in the order in which they were scheduled."""

    def __init__(self, config: CoreConfig, models: Iterable[ModelSpec], nodes: Iterable[SimulatedNode]) -> None:
        self.core = ControllerCore(config)
        self.outcome = Outcome()
        self.now: Seconds = 0.0
        self.nodes: dict[NodeId, SimulatedNode] = {node.node_id: node for node in nodes}
        self._heap: list[tuple[Seconds, int, Callable[[], None]]] = []
        self._order = 0
        self._has_more = False
        self._arrivals: dict[RequestId, Arrival] = {}
        self._waiting_first: dict[RequestId, Seconds] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        for model in models:
            self.post(ModelAdded(model))
        for node in self.nodes.values():
            node.connect(self.schedule, self.post)
            self.post(NodeJoined(node.report()))

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
        while self._heap and (self._arrivals or self._has_more):
            self.now, _, what = heapq.heappop(self._heap)
            what()
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
        self._arrivals[request_id] = arrival
        self._waiting_first[request_id] = self.now
        self._schedule_next(coming)
        sizes = (arrival.num_prompt_tokens, arrival.num_output_tokens)
        self.post(RequestArrived(RequestInfo(request_id, arrival.model_id, *sizes)))

    def _observe(self, event: Event) -> None:
        if isinstance(event, FirstToken):
            arrived_at = self._waiting_first.pop(event.request_id, None)
            if arrived_at is not None:
                self.outcome.ttft_s.append(self.now - arrived_at)
        elif isinstance(event, SequenceEnded) and event.finish_reason is FinishReason.STOP:
            self.outcome.num_finished += 1
            self.outcome.e2e_s.append(self.now - self._arrivals.pop(event.request_id).at)

    def _obey(self, action: Action) -> None:
        match action:
            case Dispatch(request_id, instance_id, node_id, attempt):
                arrival = self._arrivals[request_id]
                sizes = (arrival.num_prompt_tokens, arrival.num_output_tokens)
                sequence = SimulatedSequence(request_id, attempt, *sizes)
                self._later(lambda: self.nodes[node_id].submit(instance_id, sequence))
            case AbortSequence(request_id, instance_id, node_id):
                self._later(lambda: self.nodes[node_id].abort(instance_id, request_id))
            case EnsureInstance(spec, node_id):
                self._later(lambda: self.nodes[node_id].ensure(spec, self.now))
            case StopInstance(instance_id, node_id, drain_s):
                self._later(lambda: self.nodes[node_id].stop(instance_id, drain_s))
            case Preload(node_id, digest):
                self._later(lambda: self.nodes[node_id].preload(digest, self.now))
            case Reject(request_id, error):
                self.outcome.rejected[error.code] = self.outcome.rejected.get(error.code, 0) + 1
                del self._arrivals[request_id]
                self._waiting_first.pop(request_id, None)
            case WakeAt(at):
                self.schedule(at - self.now, lambda: self.post(Woke()))
            case _:
                pass

    def _later(self, what: Callable[[], None]) -> None:
        """A frame on a link: it arrives at once, but after the event that caused it is done."""
        self.schedule(0.0, what)

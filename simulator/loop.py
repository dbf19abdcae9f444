"""The loop: a heap of (time, order, what happens) drives the very ControllerCore that runs live. Holds no policy."""

import hashlib
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nearline.controller import ControllerCore, Event, RequestInfo
from nearline.controller.actions import (
    AbortSequence,
    Action,
    CopyCheckpoint,
    DeleteCheckpoint,
    Dispatch,
    EnsureInstance,
    Preload,
    PrepareAdapter,
    Reject,
    SolvePlan,
    StopInstance,
    WakeAt,
    YieldPlace,
)
from nearline.controller.events import (
    FirstToken,
    InstanceChanged,
    ModelAdded,
    NodeJoined,
    NodeLost,
    PlanSolved,
    RequestArrived,
    RequestCancelled,
    RequestRejected,
    SequenceEnded,
    Woke,
)
from nearline.controller.policy.planner import exact
from nearline.protocol import FinishReason, InstanceId, InstanceState, ModelSpec, NodeId, RequestId, Seconds, encode
from nearline.simulator.arrivals import Arrival
from nearline.simulator.engines import SimulatedSequence
from nearline.simulator.faults import Faults
from nearline.simulator.node import SimulatedNode
from nearline.simulator.outcome import CANCELLED, FINISHED, Call, Outcome

_MAX_TOKENS = 1024
"""What simulated callers allow their answers if they do not say."""
_MAX_SOLVED = 5
"""Groups up to which the planner gets the best plan there is, at once; beyond, no answer: the search's plan stays."""


class Simulation:
    """One run. Events of one instant happen in the order in which they were scheduled."""

    def __init__(
        self,
        core: ControllerCore,
        models: Iterable[ModelSpec],
        nodes: Iterable[SimulatedNode],
        faults: Faults | None = None,
    ) -> None:
        self.core = core
        self.outcome = Outcome()
        self.now: Seconds = 0.0
        self.nodes: dict[NodeId, SimulatedNode] = {node.node_id: node for node in nodes}
        self._heap: list[tuple[Seconds, int, Callable[..., None], tuple[Any, ...]]] = []
        self._frames: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._order = 0
        self._has_more = False
        self._calls: dict[RequestId, Call] = {}
        self._held_since: dict[InstanceId, tuple[NodeId, Seconds]] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self._faults = faults or Faults()
        self._patiences = self._faults.patiences()
        for model in models:
            self.post(ModelAdded(model))
        for node in self.nodes.values():
            node.connect(lambda: self.now, self.schedule, self.post)
            self.post(NodeJoined(node.report()))
        self._losses = self._faults.node_losses(sorted(self.nodes))
        self._schedule_loss()

    def schedule(self, delay_s: Seconds, what: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        at = self.now + delay_s if delay_s > 0.0 else self.now
        heapq.heappush(self._heap, (at, self._order, what, arguments))

    def post(self, event: Event) -> None:
        """Take an event through the core now, and let the nodes obey once it is done."""
        self.outcome.num_events += 1
        kind = type(event)
        if kind is FirstToken or kind is SequenceEnded or kind is InstanceChanged:
            self._observe(event)
        for action in self.core.on(event, self.now):
            if type(action) is Dispatch:
                self._dispatch(action)
            else:
                self._obey(action)

    def run(self, arrivals: Iterable[Arrival]) -> Outcome:
        """Run until every request has ended."""
        self._schedule_next(iter(arrivals))
        heap, frames = self._heap, self._frames
        while self._calls or self._has_more:
            while frames:
                what, arguments = frames.popleft()
                what(*arguments)
            if not heap:
                break
            self.now, _, what, arguments = heapq.heappop(heap)
            what(*arguments)
        for instance_id in list(self._held_since):
            self._let_go(instance_id)
        self.outcome.digest = self._digest.hexdigest()
        return self.outcome

    def _schedule_next(self, coming: Iterator[Arrival]) -> None:
        arrival = next(coming, None)
        self._has_more = arrival is not None
        if arrival is not None:
            self.schedule(arrival.at - self.now, self._arrive, arrival, coming)

    def _arrive(self, arrival: Arrival, coming: Iterator[Arrival]) -> None:
        calls = self.outcome.calls
        request_id = RequestId(f"r{len(calls) + 1}")
        call = self._calls[request_id] = Call(arrival)
        calls.append(call)
        self._schedule_next(coming)
        patience_s = next(self._patiences)
        if patience_s is not None:
            self.schedule(patience_s, self._hang_up, request_id)
        info = RequestInfo(
            request_id,
            arrival.model_id,
            arrival.num_prompt_tokens,
            arrival.max_tokens or max(arrival.num_output_tokens, _MAX_TOKENS),
            arrival.tenant,
            arrival.slo,
            prefix_hash=arrival.prefix_hash,
        )
        self.post(RequestArrived(info))

    def _hang_up(self, request_id: RequestId) -> None:
        call = self._calls.pop(request_id, None)
        if call is not None:
            call.end = CANCELLED
            request = self.core.fleet.requests.get(request_id)
            if request is not None and request.instance_id is not None:
                instance = self.core.fleet.instances[request.instance_id]
                node = self.nodes[instance.node.node_id]
                call.num_generated = node.num_generated(request.instance_id, request_id) or call.num_generated
            self.post(RequestCancelled(request_id, call.num_generated))

    def _schedule_loss(self) -> None:
        loss = next(self._losses, None)
        if loss is not None:
            at, node_id = loss
            self.schedule(at - self.now, self._lose, self.nodes[node_id])

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
        self.schedule(self._faults.node_back_s, self._come_back, node)

    def _come_back(self, node: SimulatedNode) -> None:
        node.come_back()
        self.post(NodeJoined(node.report()))

    def _observe(self, event: Event) -> None:
        match event:
            case FirstToken(request_id):
                call = self._calls.get(request_id)
                if call is not None and call.first_at is None:
                    call.first_at = self.now
            case SequenceEnded(request_id, _, reason, num_generated):
                call = self._calls.get(request_id)
                if call is None:
                    return  # its caller hung up in this very instant
                call.num_generated = num_generated
                if reason is FinishReason.STOP:
                    del self._calls[request_id]
                    call.ended_at, call.end = self.now, FINISHED
            case InstanceChanged(_, status):
                if status.state in (InstanceState.STOPPED, InstanceState.FAILED):
                    self._let_go(status.instance_id)

    def _let_go(self, instance_id: InstanceId) -> None:
        held = self._held_since.pop(instance_id, None)
        if held is not None:
            self.outcome.device_s += self.now - held[1]

    def _dispatch(self, action: Dispatch) -> None:
        request_id, attempt = action.request_id, action.attempt
        self._digest.update(f"{request_id} {action.instance_id} {attempt} {action.reason}".encode())
        call = self._calls[request_id]
        arrival = call.arrival
        sequence = SimulatedSequence(
            request_id,
            attempt,
            arrival.num_prompt_tokens,
            arrival.num_output_tokens,
            call.num_generated,
            arrival.prefix_hash,
            arrival.tenant,
            arrival.slo,
            action.priority,
        )
        node = self.nodes[action.node_id]
        self._send(node, node.submit, action.instance_id, sequence)

    def _send(self, node: SimulatedNode, what: Callable[..., None], *arguments: Any) -> None:
        """Frames on a link arrive after its time, and never before the event that caused them is done."""
        if node.machine.cost.hop_s:
            self.schedule(node.machine.cost.hop_s, what, *arguments)
        else:
            self._frames.append((what, arguments))

    def _obey(self, action: Action) -> None:
        self._digest.update(encode(action))
        match action:
            case AbortSequence(request_id, instance_id, node_id):
                node, call = self.nodes[node_id], self._calls.get(request_id)
                if call is not None:  # it moves, and takes what its caller has
                    call.num_generated = node.num_generated(instance_id, request_id) or call.num_generated
                self._send(node, node.abort, instance_id, request_id)
            case YieldPlace(request_id, instance_id, node_id):
                node = self.nodes[node_id]
                self._send(node, node.yield_place, instance_id, request_id)
            case EnsureInstance(spec, node_id):
                self._held_since[spec.instance_id] = (node_id, self.now)
                self.outcome.starts.append((self.now, spec.model_id))
                self._frames.append((self.nodes[node_id].ensure, (spec,)))
            case StopInstance(instance_id, node_id, drain_s):
                self._frames.append((self.nodes[node_id].stop, (instance_id, drain_s)))
            case SolvePlan(version, groups, slots):
                found = exact(groups, slots) if len(groups) <= _MAX_SOLVED else None
                self.schedule(0.0, self.post, PlanSolved(version, found))
            case Preload(node_id, digest):
                self._frames.append((self.nodes[node_id].preload, (digest,)))
            case Reject(request_id, error):
                call = self._calls.pop(request_id)
                call.end = error.code
                self._frames.append((self.post, (RequestRejected(request_id, call.num_generated),)))
            case WakeAt(at):
                self.schedule(at - self.now, self._wake)
            case PrepareAdapter() | DeleteCheckpoint() | CopyCheckpoint():
                pass  # simulated requests name no adapters, nothing is removed, and every node holds every model

    def _wake(self) -> None:
        self.post(Woke())

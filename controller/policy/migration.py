"""Which answer should go on in another instance of its model, and who should leave one whose memory is full. Pure.

Tokens move, not KV: the controller has them, and recomputing t of them takes about a·t + b (estimate.ResumeCost).
Requests go where a place is free when they begin, so answers move only where that was not enough:
1. `go_on`: an answer that was preempted waits in its engine for a place while another instance has one free.
2. `make_room`: somebody waits inside an instance that has no place left, can run nowhere else (its adapter lies on few
   nodes), and an answer beside it can: the answer goes, with its adapter, to a free place of another instance.
3. `relieve`: an instance was sent more tokens than its memory holds; who waits there without one moves to where the
   memory suffices.
Each move makes fewer wait inside instances, so none is ever taken back. Nobody moves more than `max_moves` times, nor
within `move_gap_s` of the last time, nor with a promised pace, nor if computing its tokens again costs more than a part
of what is left of it; an instance takes one that brings tokens at a time. Running answers stay in full memories,
in large batches and in instances that drain: moving those gained nothing, simulated.
Sources: [dlora] reactive co-migration of requests and adapters, [serverlessllm] migration by tokens and its a·t + b.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nearline.controller.config import CoreConfig
from nearline.controller.estimate import ResumeCost, generated_tokens
from nearline.controller.policy.balance import Move, best_place, may_move, may_take, with_place
from nearline.controller.policy.dispatch import load_of
from nearline.controller.policy.prediction import remaining_tokens
from nearline.controller.policy.views import InstanceView, RunningView
from nearline.protocol import Seconds

WORTH = 3.0
"""What is left of an answer must take this many times as long as computing its tokens again."""
FULL, ROOMY, FILLED = 0.95, 0.7, 0.85
"""Parts of an instance's memory: above the first it is relieved, below the second it takes others, up to the third."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model's answers take: `token_s` per token beside others, `resume` to compute tokens again, and `service_s`
    to hold a place."""

    token_s: Seconds
    service_s: Seconds
    resume: ResumeCost

    def generated(self, request: RunningView, now: Seconds) -> float:
        return generated_tokens(request, self.token_s, now)

    def tokens(self, request: RunningView, now: Seconds) -> float:
        """Estimate its prompt and answer so far: what it takes of an engine's memory."""
        return request.info.num_prompt_tokens + self.generated(request, now)

    def resume_s(self, request: RunningView, now: Seconds) -> Seconds:
        return self.resume.seconds(self.tokens(request, now))

    def is_worth(self, request: RunningView, now: Seconds) -> bool:
        """Whether enough is left of an answer."""
        done = self.generated(request, now)
        rest = remaining_tokens(request.predicted_tokens, done, request.info.max_tokens)
        return rest * self.token_s > WORTH * self.resume_s(request, now)


def go_on(instances: Sequence[InstanceView], costs: Costs, now: Seconds, config: CoreConfig) -> Move | None:
    """Name a preempted answer that goes on elsewhere sooner than where it is, the one that waits longest first."""
    free = with_place(instances, now, config)
    held = [(r, i) for i in instances if i.num_preempted for r in i.in_flight.values() if r.preempted_at is not None]
    for request, source in sorted(held, key=lambda pair: (pair[0].preempted_at or 0.0, pair[0].order)):
        if not source.is_acknowledged or load_of(source) < source.max_running or not may_move(request, now, config):
            continue
        waited_s = now - (request.preempted_at or 0.0)
        if waited_s < costs.resume_s(request, now) or not costs.is_worth(request, now):
            continue
        target = best_place(free, request)
        if target is not None:
            reason = f"it gave way {waited_s:.1f} s ago, {target.instance_id} has a free place"
            return Move(request, source.instance_id, target.instance_id, reason)
    return None


def make_room(instances: Sequence[InstanceView], costs: Costs, now: Seconds, config: CoreConfig) -> Move | None:
    """Name an answer whose place somebody needs who waits beside it and can run nowhere else: the cheapest to resume.

    To be asked once `balance.move` has found nobody who waits and could go himself.
    """
    free = with_place(instances, now, config)
    for source in sorted(instances, key=lambda i: (i.max_running - load_of(i), i.instance_id)):
        if load_of(source) <= source.max_running:
            break
        if not source.is_usable or not source.is_acknowledged:
            continue
        soon_s = costs.service_s / source.max_running
        found = []
        for request in source.in_flight.values():
            if not request.has_token or request.preempted_at is not None or not may_move(request, now, config):
                continue
            cost_s = costs.resume_s(request, now)
            if cost_s < soon_s and costs.is_worth(request, now):
                found.append((cost_s, -request.order, request))
        for _, _, request in sorted(found, key=lambda each: each[:2]):
            target = best_place(free, request)
            if target is not None:
                held = f"{load_of(source)} requests for {source.max_running} places on {source.instance_id}"
                reason = f"{held}, those who wait can run only there, {target.instance_id} has a free place"
                return Move(request, source.instance_id, target.instance_id, reason)
    return None


def relieve(instances: Sequence[InstanceView], costs: Costs, now: Seconds, config: CoreConfig) -> Move | None:
    """Name somebody who waits for memory inside one instance and would find it in another.

    An instance needs the tokens of all it was sent. Who leaves has waited twice as long as his prompt takes; the other
    instance then needs less than this one did, and leaves room for its answers to grow.
    """
    needs = {i.instance_id: sum(costs.tokens(r, now) for r in i.in_flight.values()) for i in instances}
    full = [i for i in instances if needs[i.instance_id] > FULL * i.kv_tokens_total > 0]
    roomy = [i for i in instances if needs[i.instance_id] < ROOMY * i.kv_tokens_total] if full else []
    roomy = with_place(roomy, now, config)
    for source in sorted(full, key=lambda i: (-needs[i.instance_id] / i.kv_tokens_total, i.instance_id)):
        if not roomy or not source.is_usable or not source.is_acknowledged:
            continue
        waiting = [r for r in source.in_flight.values() if not r.has_token and may_move(r, now, config)]
        for request in sorted(waiting, key=lambda r: (costs.tokens(r, now), r.order)):
            tokens = costs.tokens(request, now)
            if now - request.dispatched_at < 2.0 * costs.resume.seconds(tokens):
                continue
            limits = {i.instance_id: min(needs[source.instance_id], FILLED * i.kv_tokens_total) for i in roomy}
            fit = [i for i in roomy if needs[i.instance_id] + tokens < limits[i.instance_id]]
            targets = [i for i in fit if may_take(i, request)]
            if targets:
                target = min(targets, key=lambda i: (needs[i.instance_id], i.instance_id))
                need = f"{needs[source.instance_id]:.0f} tokens for {source.kv_tokens_total} on {source.instance_id}"
                return Move(request, source.instance_id, target.instance_id, f"{need}, {target.instance_id} has room")
    return None

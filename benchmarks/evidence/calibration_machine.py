"""A live run's machine as the simulator sees it, and the run again in virtual time."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from benchmarks.evidence.calibration_journal import SIX, Answer, Lived, Run, Timing
from nearline.controller import ControllerCore
from nearline.protocol import Digest, ModelId, NodeId, StepTimeModel, Tier
from nearline.simulator import Arrival, Call, Machine, SimulatedModel, SimulatedNode, Simulation, paced, stepped
from nearline.simulator.cost_model import CostModel

REST_S, MOST_SETTLE_S, PROBE_S = 1.0, 0.4, 0.2
"""An engine is busy with itself once per bind, after this rest; for how long at most; who asks so soon sees it all."""
Costs = tuple[Machine, dict[Digest, SimulatedModel]]


def simulated(lived: Lived, machine: Machine, models: dict[Digest, SimulatedModel], is_fast: bool = False) -> Run:
    """Run the journal's requests, the warm-up too, over a machine."""
    node = SimulatedNode(NodeId(lived.report.node_id), machine, models, paced if is_fast else stepped)
    simulation = Simulation(ControllerCore(lived.config), lived.specs.values(), [node])
    origin = min(answer.arrived_at for answer in lived.answers) - 1.0
    answers = sorted(lived.answers, key=lambda answer: answer.arrived_at)
    outcome = simulation.run([_arrival(answer, origin) for answer in answers])
    begun_at = lived.begun_at - origin
    timings = [_timing(call) for call in outcome.calls if call.arrival.at >= begun_at]
    before = [model for at, model in outcome.starts if at < begun_at]
    return Run(timings, [*before[-1:], *(model for at, model in outcome.starts if at >= begun_at)])


def _timing(call: Call) -> Timing:
    assert call.ttft_s is not None, "a request that was answered live was not in the simulation"
    return Timing(call.ttft_s, call.ended_at - call.arrival.at, call.tpot_s)


def machine_of(lived: Lived) -> Costs:
    """Machine and models with the costs of the profiles and of the warm-up; nothing of the load is looked at."""
    machine, models = profile_only(lived)
    cost = replace(machine.cost, stop_s=stop_s(lived), hop_s=hop_s(lived))
    machine = replace(machine, cost=cost, slowdown_beside=slowdown_beside(lived) if machine.num_slots > 1 else 0.0)
    for model_id, spec in lived.specs.items():
        steps = steps_of(lived, model_id)
        binds_s = tuple(max(0.0, first - cost.hop_s) for first in first_steps_s(lived, model_id, steps))
        digest, num_bytes = spec.checkpoint.digest, spec.checkpoint.num_bytes
        models[digest] = SimulatedModel(
            num_bytes=num_bytes, steps=steps, binds_s=binds_s, settle_s=settle_s(lived, model_id)
        )
    return machine, models


def profile_only(lived: Lived) -> Costs:
    """What the node says of itself, and the profiles, as they are."""
    report, rates = lived.report, {row.tier: row.bytes_per_s for row in lived.report.bandwidths}
    status = next(start.status for start in reversed(lived.starts) if start.loading_at < lived.begun_at)
    cost = CostModel(
        ssd_bytes_per_s=rates[Tier.SSD],
        dram_bytes_per_s=rates.get(Tier.DRAM, 1e13),
        bind_s=report.bind_s,
        process_s=report.process_s,
        max_running=status.max_running,
        kv_tokens=status.kv_tokens_total,
    )
    machine = Machine(
        cost=cost,
        num_slots=sum(device.num_slots for device in report.devices),
        dram_bytes=report.dram_pool_bytes,
        frame_bytes=report.dram_frame_bytes,
    )
    models = {
        spec.checkpoint.digest: SimulatedModel(
            num_bytes=spec.checkpoint.num_bytes, steps=lived.profiles[model_id].model, binds_s=(lived.bind_s(model_id),)
        )
        for model_id, spec in lived.specs.items()
    }
    return machine, models


def num_beside(answer: Answer, answers: Sequence[Answer]) -> int:
    """How many other requests were under way at some time of this one."""
    return sum(b.arrived_at <= answer.ended_at and b.ended_at >= answer.arrived_at for b in answers) - 1


def lone(lived: Lived) -> list[Answer]:
    """Requests of the warm-up beside which nothing else was under way."""
    answers = lived.warm_up()
    return [answer for answer in answers if not num_beside(answer, answers)]


def warm(lived: Lived, model_id: ModelId) -> list[tuple[float, float, float | None]]:
    """Of lone requests whose instance was there: their prefill by the profile; what their first tokens took beyond it;
    and how long the instance had been without work, if that was its first rest of at least a second."""
    answers = [a for a in lone(lived) if a.info.model_id == model_id and lived.start_of(a) is None]
    prefills = [lived.profiles[model_id].model.prefill_s(a.info.num_prompt_tokens) for a in answers]
    return [(seconds, a.ttft_s - seconds, lived.first_rest_s(a)) for a, seconds in zip(answers, prefills, strict=True)]


def beyond_s(lived: Lived, model_id: ModelId) -> float:
    """The mean of it, for means are compared, where the engine did nothing of its own."""
    return fmean(seconds for _, seconds, rest_s in warm(lived, model_id) if not may_settle(rest_s))


def may_settle(rest_s: float | None) -> bool:
    return rest_s is not None and REST_S <= rest_s < REST_S + MOST_SETTLE_S


def settle_s(lived: Lived, model_id: ModelId) -> float:
    """For how long an engine is busy with itself once it has rested: from those whom it kept waiting, or could have."""
    usual_s = beyond_s(lived, model_id)
    found = [rest_s - REST_S + seconds - usual_s for _, seconds, rest_s in warm(lived, model_id)
             if rest_s is not None and REST_S <= rest_s < REST_S + PROBE_S]  # fmt: skip
    return max(0.0, fmean(found)) if found else 0.0


def hop_s(lived: Lived) -> float:
    """What the models have in common of it: the way through the front door and the links."""
    return max(0.0, min(beyond_s(lived, model_id) for model_id in lived.specs))


def steps_of(lived: Lived, model_id: ModelId) -> StepTimeModel:
    """The profile, and what a step costs on top while tokens stream to callers: from lone requests and from six. A
    prefill is stretched as a whole: what makes one longer than profiled makes a long one much longer."""
    steps = lived.profiles[model_id].model
    own = [a for a in lived.warm_up() if a.info.model_id == model_id]
    streaming = [(num_beside(a, lived.warm_up()), a) for a in own if a.num_tokens >= 20]
    one = fmean(_beyond_decode_s(a, steps, 1) for others, a in streaming if not others)
    six = fmean(_beyond_decode_s(a, steps, SIX) for others, a in streaming if others == SIX - 1)
    usual_s = fmean(prefill_s for prefill_s, _, rest_s in warm(lived, model_id) if not may_settle(rest_s))
    stretch = max(0.0, 1.0 + (beyond_s(lived, model_id) - hop_s(lived)) / usual_s)
    per_sequence = max((six - one) / (SIX - 1), -steps.decode_per_sequence_s)
    return replace(
        steps,
        prefill_base_s=stretch * steps.prefill_base_s,
        prefill_per_token_s=stretch * steps.prefill_per_token_s,
        prefill_per_square_s=stretch * steps.prefill_per_square_s,
        decode_base_s=max(0.0, steps.decode_base_s + one - per_sequence),
        decode_per_sequence_s=steps.decode_per_sequence_s + per_sequence,
    )


def _beyond_decode_s(answer: Answer, steps: StepTimeModel, num_sequences: int) -> float:
    context = answer.info.num_prompt_tokens + answer.num_tokens // 2
    return answer.token_s - steps.decode_s(num_sequences, num_sequences * context)


def stop_s(lived: Lived) -> float:
    """From a request that needs the slot to its next start, where an idle instance had to stop first."""
    found = []
    for answer in lone(lived):
        start = lived.start_of(answer)
        last = lived.last_end(answer.arrived_at)
        if start is None or last is None or may_settle(answer.arrived_at - last):
            continue
        if any(s.draining_at and answer.arrived_at <= s.draining_at <= start.loading_at for s in lived.starts):
            found.append(start.loading_at - answer.arrived_at)
    return fmean(found)


def slowdown_beside(lived: Lived) -> float:
    """By how much the tokens of one model come later while another one decodes beside it: the pairs of the warm-up."""
    answers, found = lived.warm_up(), []
    for a in answers:
        others = [b for b in answers if b is not a and b.arrived_at <= a.ended_at and b.ended_at >= a.arrived_at]
        is_pair = len(others) == 1 and others[0].info.model_id != a.info.model_id
        if is_pair and a.num_tokens >= 20 and others[0].first_at <= a.first_at and others[0].ended_at >= a.ended_at:
            steps = steps_of(lived, a.info.model_id)
            found.append(a.token_s / steps.decode_s(1, a.info.num_prompt_tokens + a.num_tokens // 2) - 1.0)
    return max(0.0, fmean(found)) if found else 0.0


def first_steps_s(lived: Lived, model_id: ModelId, steps: StepTimeModel) -> list[float]:
    """From the wish for an instance to its first token, less the prefill: each start of the warm-up that found its
    bytes in DRAM and began with one request."""
    times, own = [], [a for a in lived.warm_up() if a.info.model_id == model_id]
    for answer in own:
        start = lived.start_of(answer)
        if start is None or (start.status.timings and start.status.timings.tier is not Tier.DRAM):
            continue
        if sum(a.arrived_at <= answer.first_at and a.first_at >= start.loading_at for a in own) == 1:
            times.append(answer.first_at - start.loading_at - steps.prefill_s(answer.info.num_prompt_tokens))
    return times or [lived.bind_s(model_id)]


def described(lived: Lived, machine: Machine, models: dict[Digest, SimulatedModel]) -> list[str]:
    """What the simulation is given, in words."""
    cost = machine.cost
    rows = [f"front door to engine and back {1e3 * cost.hop_s:.1f} ms; an idle instance makes way in "
            f"{1e3 * cost.stop_s:.1f} ms; a process warms up in {cost.process_s:.1f} s"]  # fmt: skip
    if machine.num_slots > 1:
        rows[0] += f"; beside another one that computes, a step takes {100 * machine.slowdown_beside:.0f} % more"
    for model_id, spec in lived.specs.items():
        made, base = models[spec.checkpoint.digest], lived.profiles[model_id].model
        steps = made.steps
        assert steps is not None, "every model was profiled"
        rows.append(
            f"{model_id}: prefill {1e3 * steps.prefill_base_s:.1f} ms + {1e6 * steps.prefill_per_token_s:.0f} µs per "
            f"token (profile: {1e3 * base.prefill_base_s:.1f} ms), decode {1e3 * steps.decode_base_s:.1f} ms + "
            f"{1e3 * steps.decode_per_sequence_s:.2f} ms per sequence (profile: {1e3 * base.decode_base_s:.1f} + "
            f"{1e3 * base.decode_per_sequence_s:.2f}); {len(made.binds_s)} starts, taken in turn: "
            f"{1e3 * fmean(made.binds_s):.0f} ms to the first step, {1e3 * max(made.binds_s):.0f} at most; busy with "
            f"itself once per start, after a second without work: {1e3 * made.settle_s:.0f} ms"
        )
    return rows


def _arrival(answer: Answer, origin: float) -> Arrival:
    info = answer.info
    return Arrival(
        answer.arrived_at - origin,
        info.model_id,
        info.num_prompt_tokens,
        answer.num_tokens,
        info.tenant,
        info.slo,
        info.prefix_hash,
        info.max_tokens,
    )

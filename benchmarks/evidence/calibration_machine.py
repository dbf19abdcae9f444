"""A live run's machine as the simulator sees it, and the run again in virtual time."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from benchmarks.evidence.calibration_journal import Answer, Lived
from nearline.controller import ControllerCore
from nearline.protocol import Digest, ModelId, NodeId, StepTimeModel, Tier
from nearline.simulator import Arrival, Machine, SimulatedModel, SimulatedNode, Simulation, stepped
from nearline.simulator.cost_model import CostModel
from nearline.simulator.report import summary


def simulated(lived: Lived) -> dict[str, float]:
    """Run the journal's requests, the warm-up too, over the machine that was measured."""
    machine, models = machine_of(lived)
    node = SimulatedNode(NodeId(lived.report.node_id), machine, models, stepped)
    simulation = Simulation(ControllerCore(lived.config), lived.specs.values(), [node])
    origin = min(answer.arrived_at for answer in lived.answers) - 1.0
    answers = sorted(lived.answers, key=lambda answer: answer.arrived_at)
    outcome = simulation.run([_arrival(answer, origin) for answer in answers])
    begun_at = lived.begun_at - origin
    calls = [call for call in outcome.calls if call.arrival.at >= begun_at]
    starts = [model for at, model in outcome.starts if at >= begun_at]
    before = [model for at, model in outcome.starts if at < begun_at]
    chain = [*before[-1:], *starts]
    return {
        **summary([call.ttft_s for call in calls if call.ttft_s is not None]),
        "e2e": fmean(call.ended_at - call.arrival.at for call in calls),
        "tpot": fmean(pace for call in calls if (pace := call.tpot_s) is not None),
        "starts": len(starts),
        "swaps": sum(a != b for a, b in pairwise(chain)),
    }


def machine_of(lived: Lived) -> tuple[Machine, dict[Digest, SimulatedModel]]:
    """Machine and models with the costs of the run."""
    report, rates = lived.report, {row.tier: row.bytes_per_s for row in lived.report.bandwidths}
    status = lived.starts[-1].status
    cost = CostModel(
        ssd_bytes_per_s=rates[Tier.SSD],
        dram_bytes_per_s=rates.get(Tier.DRAM, 1e13),
        process_s=report.process_s,
        stop_s=lived.stop_s(),
        max_running=status.max_running,
        kv_tokens=status.kv_tokens_total,
        hop_s=hop_s(lived),
    )
    machine = Machine(
        cost=cost,
        num_slots=sum(device.num_slots for device in report.devices),
        dram_bytes=report.dram_pool_bytes,
        frame_bytes=report.dram_frame_bytes,
    )
    models = {}
    for model_id, spec in lived.specs.items():
        steps = steps_of(lived, model_id)
        checkpoint = spec.checkpoint
        binds_s = tuple(max(0.0, first - cost.hop_s) for first in first_steps_s(lived, model_id, steps))
        models[checkpoint.digest] = SimulatedModel(num_bytes=checkpoint.num_bytes, steps=steps, binds_s=binds_s)
    return machine, models


def alone(answers: Sequence[Answer]) -> list[Answer]:
    """Requests beside which nothing else was under way."""
    return [a for a in answers
            if all(a is b or b.ended_at < a.arrived_at or b.arrived_at > a.ended_at for b in answers)]  # fmt: skip


def hop_s(lived: Lived) -> float:
    """What lies between the front door and an engine, there and back: the first token of lone warm requests, in the
    mean, for a mean is compared."""
    beyond = []
    for answer in alone(lived.warm_up()):
        steps = lived.profiles[answer.info.model_id].model
        is_warm = not any(s.loading_at >= answer.arrived_at and s.loading_at <= answer.first_at for s in lived.starts)
        if is_warm:
            beyond.append(answer.ttft_s - steps.prefill_s(answer.info.num_prompt_tokens))
    return max(0.0, fmean(beyond))


def steps_of(lived: Lived, model_id: ModelId) -> StepTimeModel:
    """The profile, and what a step costs on top while tokens stream to callers: from lone and from six requests."""
    steps = lived.profiles[model_id].model
    own = [a for a in lived.warm_up() if a.info.model_id == model_id and a.num_tokens >= 20]
    lone = alone(own)
    context = own[0].info.num_prompt_tokens + 15
    one = median(a.token_s for a in lone) - steps.decode_s(1, context)
    six = median(a.token_s for a in own if a not in lone) - steps.decode_s(6, 6 * context)
    per_sequence = (six - one) / 5
    base = one - per_sequence
    return replace(
        steps,
        prefill_base_s=steps.prefill_base_s + max(0.0, base),
        decode_base_s=steps.decode_base_s + base,
        decode_per_sequence_s=max(0.0, steps.decode_per_sequence_s + per_sequence),
    )


def first_steps_s(lived: Lived, model_id: ModelId, steps: StepTimeModel) -> list[float]:
    """From the wish for an instance to its first token, less the prefill: each start of the warm-up."""
    times = []
    for start in lived.starts:
        if start.model_id != model_id or start.loading_at >= lived.begun_at:
            continue
        waiting = [a for a in lived.warm_up()
                   if a.info.model_id == model_id and a.arrived_at <= start.loading_at <= a.first_at]  # fmt: skip
        if waiting:
            first = waiting[0]
            times.append(first.first_at - start.loading_at - steps.prefill_s(first.info.num_prompt_tokens))
    return times or [lived.bind_s(model_id)]


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

"""What a run's outcome says, as one object of JSON's types. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from nearline.controller.promises import Tally
from nearline.protocol import Seconds
from nearline.simulator.loop import Simulation
from nearline.simulator.node import SimulatedNode
from nearline.simulator.outcome import Call, Outcome


def report(simulation: Simulation, outcome: Outcome) -> dict[str, Any]:
    """Summarise a run: counts, times, attainment, starts, fairness and what it cost."""
    nodes = list(simulation.nodes.values())
    return {
        "num_arrived": outcome.num_arrived,
        "num_finished": outcome.num_finished,
        "num_cancelled": outcome.num_cancelled,
        "rejected": outcome.rejected,
        "ttft_s": summary(outcome.ttft_s),
        "tpot_s": summary(outcome.tpot_s),
        "e2e_s": summary(outcome.e2e_s),
        "ttft_s_by_class": by_class(outcome.calls),
        "attainment": attainment(simulation),
        "prediction": prediction(simulation),
        "starts_by_tier": starts_by_tier(nodes),
        "num_swaps": sum(node.num_swaps for node in nodes),
        "num_node_losses": outcome.num_node_losses,
        "fairness": fairness(list(outcome.served.values())),
        "device_s": round(outcome.device_s, 3),
        "num_events": outcome.num_events,
        "virtual_s": round(simulation.now, 3),
        "digest": outcome.digest,
    }


def summary(values: Sequence[Seconds]) -> dict[str, float]:
    """Mean and nearest-rank percentiles."""
    if not values:
        return {}
    ranked = sorted(values)
    ranks = {f"p{p}": ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in (50, 90, 99)}
    figures = {"mean": sum(ranked) / len(ranked), **ranks, "max": ranked[-1]}
    return {name: round(value, 6) for name, value in figures.items()}


def by_class(calls: Iterable[Call]) -> dict[str, dict[str, float]]:
    """Times to first token of each SLO class."""
    times: dict[str, list[Seconds]] = {}
    for call in calls:
        if call.first_at is not None:
            times.setdefault(call.arrival.slo.slo_class.value, []).append(call.first_at - call.arrival.at)
    return {name: summary(values) for name, values in sorted(times.items())}


def attainment(simulation: Simulation) -> dict[str, dict[str, float]]:
    """Part of the requests whose promise was kept, by SLO class; refusals count as broken promises."""
    classes: dict[str, Tally] = {}
    for (_, slo_class, _), row in simulation.core.fleet.promises.rows.items():
        tally = classes.setdefault(slo_class.value, Tally())
        tally.num_met += row.num_met
        tally.num_missed += row.num_missed
        tally.num_refused += row.num_refused
    return {
        name: {"attained": round(t.attainment, 6), "met": t.num_met, "missed": t.num_missed, "refused": t.num_refused}
        for name, t in sorted(classes.items())
    }


def attained(simulation: Simulation) -> float:
    """Part of all requests whose promise was kept."""
    rows = simulation.core.fleet.promises.rows.values()
    total = sum(row.num_met + row.num_missed + row.num_refused for row in rows)
    return sum(row.num_met for row in rows) / max(1, total)


def prediction(simulation: Simulation) -> dict[str, float]:
    """How good predicted lengths (mean size of the error over the mean length) and told waits have been."""
    models = list(simulation.core.fleet.models.values())
    lengths = [model.lengths.calibration for model in models if model.lengths.calibration.num_answers]
    num_answers = sum(c.num_answers for c in lengths)
    num_waits = sum(model.waits.num_observed for model in models)
    covered = {q: sum(model.waits.num_covered[q] for model in models) / max(1, num_waits) for q in (0.5, 0.9)}
    actual = sum(c.actual.mean * c.num_answers for c in lengths) / max(1, num_answers)
    size = sum(c.size.mean * c.num_answers for c in lengths) / max(1, num_answers)
    return {
        "length_error": round(size / actual, 4) if actual else 0.0,
        "num_waits": num_waits,
        "wait_within_p50": round(covered[0.5], 4),
        "wait_within_p90": round(covered[0.9], 4),
    }


def fairness(served: Sequence[float]) -> dict[str, float]:
    """Weighted tokens served per tenant: extremes, and Jain's index (1: all the same)."""
    if not served:
        return {}
    squares = sum(value * value for value in served)
    jain = sum(served) ** 2 / (len(served) * squares) if squares else 1.0
    return {"num_tenants": len(served), "least": min(served), "most": max(served), "jain": round(jain, 6)}


def starts_by_tier(nodes: Iterable[SimulatedNode]) -> dict[str, int]:
    starts: dict[str, int] = {}
    for node in nodes:
        for tier, count in node.starts_by_tier.items():
            starts[tier.value] = starts.get(tier.value, 0) + count
    return starts

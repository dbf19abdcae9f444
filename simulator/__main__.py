"""`python -m nearline.simulator`: one synthetic run on an equal fleet, its outcome as JSON."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from nearline.controller import CoreConfig
from nearline.protocol import CheckpointInfo, CheckpointKind, Digest, ModelSpec, NodeId, Seconds
from nearline.simulator.arrivals import Traffic, arrivals, model_ids
from nearline.simulator.cost_model import CostModel
from nearline.simulator.loop import Simulation
from nearline.simulator.node import SimulatedNode


def simulate(options: argparse.Namespace) -> dict[str, Any]:
    """Run the options' traffic over the options' fleet and summarise it."""
    names = model_ids(options.models)
    digests = {name: Digest(f"digest-{name}") for name in names}
    size = round(options.model_gb * 1e9)
    models = [
        ModelSpec(
            name,
            CheckpointInfo(digests[name], CheckpointKind.MODEL, size, "llama", "LlamaForCausalLM", "", "bfloat16", ()),
            created_at=0.0,
            keep_alive_s=options.keep_alive,
            max_replicas=options.max_replicas,
        )
        for name in names
    ]
    sizes = dict.fromkeys(digests.values(), size)
    dram_bytes = round(options.dram_gb * 1e9)
    node_ids = [NodeId(f"n{index:04d}") for index in range(1, options.nodes + 1)]
    nodes = [SimulatedNode(node_id, options.slots, dram_bytes, sizes, CostModel()) for node_id in node_ids]
    traffic = Traffic(
        num_models=options.models,
        rate_per_s=options.rate,
        seconds=options.seconds,
        seed=options.seed,
        cv=options.cv,
        zipf=options.zipf,
    )
    simulation = Simulation(CoreConfig(), models, nodes)
    outcome = simulation.run(arrivals(traffic))
    starts: dict[str, int] = {}
    for node in nodes:
        for tier, count in node.starts_by_tier.items():
            starts[tier.value] = starts.get(tier.value, 0) + count
    return {
        "num_arrived": outcome.num_arrived,
        "num_finished": outcome.num_finished,
        "rejected": outcome.rejected,
        "ttft_s": summary(outcome.ttft_s),
        "e2e_s": summary(outcome.e2e_s),
        "starts_by_tier": starts,
        "num_swaps": sum(node.num_swaps for node in nodes),
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


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nearline simulate", description=__doc__)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--slots", type=int, default=1, help="instances per node")
    parser.add_argument("--dram-gb", type=float, default=64.0, help="DRAM pool per node")
    parser.add_argument("--model-gb", type=float, default=14.0, help="bytes of each model")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second, all models together")
    parser.add_argument("--seconds", type=float, default=600.0, help="time during which requests arrive")
    parser.add_argument("--cv", type=float, default=1.0, help="variation of the gaps; 1 is Poisson")
    parser.add_argument("--zipf", type=float, default=1.0, help="skew of the models' popularity; 0 is uniform")
    parser.add_argument("--keep-alive", type=float, default=300.0)
    parser.add_argument("--max-replicas", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(simulate(parse(sys.argv[1:])), indent=2) + "\n")

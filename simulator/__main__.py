"""`python -m nearline.simulator`: one run of a trace or of synthetic traffic on an equal fleet, its outcome as JSON."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nearline.controller import CoreConfig
from nearline.protocol import CheckpointInfo, CheckpointKind, Digest, ModelSpec, NodeId
from nearline.simulator.arrivals import Arrival, Shape, Traffic, arrivals, model_ids
from nearline.simulator.faults import Faults
from nearline.simulator.loop import Outcome, Simulation
from nearline.simulator.node import SimulatedNode
from nearline.simulator.plot import plot_ttft
from nearline.simulator.profiles import PROFILES
from nearline.simulator.report import report
from nearline.simulator.traces import Spread, read_trace


def simulate(options: argparse.Namespace) -> dict[str, Any]:
    """Run the options' traffic over the options' fleet and summarise it."""
    return report(*run(options))


def run(options: argparse.Namespace) -> tuple[Simulation, Outcome]:
    """Build the options' fleet and run the options' traffic over it."""
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
    cost = PROFILES[options.profile]
    nodes = [SimulatedNode(node_id, options.slots, dram_bytes, sizes, cost) for node_id in node_ids]
    faults = Faults(seed=options.seed, node_loss_every_s=options.lose_node_every, cancel_part=options.cancel)
    simulation = Simulation(core_config(options.set), models, nodes, faults)
    return simulation, simulation.run(traffic(options))


def traffic(options: argparse.Namespace) -> Iterable[Arrival]:
    if options.trace is not None:
        spread = Spread(
            num_models=options.models,
            seed=options.seed,
            zipf=options.zipf,
            num_tenants=options.tenants,
            speedup=options.speedup,
            max_requests=options.max_requests,
        )
        return read_trace(options.trace, spread)
    return arrivals(
        Traffic(
            num_models=options.models,
            rate_per_s=options.rate,
            seconds=options.seconds,
            seed=options.seed,
            cv=options.cv,
            zipf=options.zipf,
            shape=Shape(options.shape),
            num_tenants=options.tenants,
            batch_part=options.batch_part,
        )
    )


def core_config(settings: Sequence[str]) -> CoreConfig:
    """Read NAME=NUMBER pairs into the core's numbers. Raises ValueError naming a setting that is none."""
    kinds = {field.name: field.type for field in fields(CoreConfig)}
    config = CoreConfig()
    for setting in settings:
        name, _, value = setting.partition("=")
        if not isinstance(getattr(config, name, None), (int, float)) or name not in kinds:
            raise ValueError(f"{name!r} is no number of CoreConfig; see controller/config.py for their names")
        config = replace(config, **{name: type(getattr(config, name))(value)})
    return config


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nearline simulate", description=__doc__)
    add = parser.add_argument
    add("--models", type=int, default=20)
    add("--nodes", type=int, default=4)
    add("--slots", type=int, default=1, help="instances per node")
    add("--dram-gb", type=float, default=64.0, help="DRAM pool per node")
    add("--model-gb", type=float, default=14.0, help="bytes of each model")
    add("--profile", choices=sorted(PROFILES), default="a10g-7b", help="how fast an instance is")
    add("--trace", type=Path, help="an Azure LLM csv, a Mooncake jsonl or a VTC jsonl; default: synthetic traffic")
    add("--speedup", type=float, default=1.0, help="divide a trace's times by this")
    add("--max-requests", type=int, help="cut a trace after so many")
    add("--rate", type=float, default=5.0, help="requests per second, all models together")
    add("--seconds", type=float, default=600.0, help="time during which requests arrive")
    add("--cv", type=float, default=1.0, help="variation of the gaps; 1 is Poisson")
    add("--shape", choices=[shape.value for shape in Shape], default="steady", help="how the rate moves")
    add("--zipf", type=float, default=1.0, help="skew of the models' popularity; 0 is uniform")
    add("--tenants", type=int, default=1)
    add("--batch-part", type=float, default=0.0, help="part of the requests in class batch-1m")
    add("--lose-node-every", type=float, default=0.0, metavar="S", help="mean time between losses of a node; 0: never")
    add("--cancel", type=float, default=0.0, metavar="PART", help="part of the callers that hang up early")
    add("--keep-alive", type=float, default=300.0)
    add("--max-replicas", type=int, default=1)
    add("--set", action="append", default=[], metavar="NAME=NUMBER", help="a number of the core's policy; repeatable")
    add("--plot", type=Path, metavar="PNG", help="draw the times to first token (needs matplotlib)")
    add("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        simulation, outcome = run(options)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"nearline simulate: {error}\n")
        return 2
    sys.stdout.write(json.dumps(report(simulation, outcome), indent=2) + "\n")
    if options.plot is not None:
        try:
            plot_ttft(outcome.ttft_s, options.plot, f"{options.models} models on {options.nodes} nodes")
        except ImportError:
            sys.stderr.write("nearline simulate: no plot, matplotlib is not installed; `pip install matplotlib`\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

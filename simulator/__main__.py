"""`python -m nearline.simulator`: one run of a trace or of synthetic traffic over a fleet, its outcome as JSON."""

import argparse
import gc
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nearline.controller import CoreConfig
from nearline.simulator.arrivals import Arrival, Shape, Traffic, arrivals
from nearline.simulator.cost_model import SimulatedModel
from nearline.simulator.faults import Faults
from nearline.simulator.fleet import GB, Fleet, add_models, equal_machine, make_fleet, numbered, read_fleet
from nearline.simulator.loop import Simulation
from nearline.simulator.node import MakeEngine, paced
from nearline.simulator.outcome import Outcome
from nearline.simulator.plot import plot_ttft
from nearline.simulator.policies import POLICIES, make_core
from nearline.simulator.profiles import PROFILES
from nearline.simulator.report import report
from nearline.simulator.stepped import stepped
from nearline.simulator.traces import Spread, read_trace

DETAILS: dict[str, MakeEngine] = {"fast": paced, "engine": stepped}


def run(options: argparse.Namespace) -> tuple[Simulation, Outcome]:
    """Build the options' fleet and run the options' traffic over it."""
    fleet = options_fleet(options)
    faults = Faults(seed=options.seed, node_loss_every_s=options.lose_node_every, cancel_part=options.cancel)
    core = make_core(options.policy, core_config(options.set))
    with _uncollected():
        simulation = Simulation(core, fleet.specs, fleet.nodes(DETAILS[options.detail]), faults)
        return simulation, simulation.run(traffic(options, fleet))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the cycle collector away: it would walk every request of the run again and again, and finds next to none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.unfreeze()  # all that is left is old now, and not walked at the next allocation
            gc.enable()


def options_fleet(options: argparse.Namespace) -> Fleet:
    """The fleet file, or equal machines and models by number."""
    if options.fleet is not None:
        return read_fleet(options.fleet)
    machine = equal_machine(options.profile, options.slots, options.dram_gb)
    model = SimulatedModel(num_bytes=round(options.model_gb * GB))
    spec = {"keep_alive_s": options.keep_alive, "max_replicas": options.max_replicas}
    machines = dict.fromkeys(numbered("n", options.nodes), machine)
    return make_fleet(machines, add_models("m", options.models, model, **spec))


def traffic(options: argparse.Namespace, fleet: Fleet) -> Iterable[Arrival]:
    if options.trace is not None:
        spread = Spread(
            models=fleet.names,
            seed=options.seed,
            zipf=options.zipf,
            num_tenants=options.tenants,
            speedup=options.speedup,
            max_requests=options.max_requests,
            batch_part=options.batch_part,
            seconds=options.seconds,
        )
        return read_trace(options.trace, spread)
    return arrivals(
        Traffic(
            num_models=len(fleet.specs),
            models=fleet.names,
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
    add("--fleet", type=Path, help="a TOML file of nodes and models; it replaces the options of the fleet below")
    add("--policy", choices=sorted(POLICIES), default="nearline", help="who decides; single ideas are for comparison")
    add("--detail", choices=sorted(DETAILS), default="fast", help="engine: the engine's own scheduler, step by step")
    fleet = parser.add_argument_group("an equal fleet").add_argument
    fleet("--models", type=int, default=20)
    fleet("--nodes", type=int, default=4)
    fleet("--slots", type=int, default=1, help="instances per node")
    fleet("--dram-gb", type=float, default=64.0, help="DRAM pool per node")
    fleet("--model-gb", type=float, default=14.0, help="bytes of each model")
    fleet("--profile", choices=sorted(PROFILES), default="a10g-7b", help="how fast an instance is")
    fleet("--keep-alive", type=float, default=300.0)
    fleet("--max-replicas", type=int, default=1)
    add_traffic(parser)
    add("--lose-node-every", type=float, default=0.0, metavar="S", help="mean time between losses of a node; 0: never")
    add("--cancel", type=float, default=0.0, metavar="PART", help="part of the callers that hang up early")
    add("--set", action="append", default=[], metavar="NAME=NUMBER", help="a number of the core's policy; repeatable")
    add("--plot", type=Path, metavar="FILE", help="draw the run as PNG or SVG (needs matplotlib)")
    add("--json", type=Path, metavar="FILE", help="write the outcome there instead of printing it")
    add("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def add_traffic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("traffic").add_argument
    add("--trace", type=Path, help="Azure LLM csv, Mooncake jsonl, VTC jsonl, or a ServeGen directory; else synthetic")
    add("--speedup", type=float, default=1.0, help="divide a trace's times by this")
    add("--max-requests", type=int, help="cut a trace after so many")
    add("--rate", type=float, default=5.0, help="requests per second, all models together")
    add("--seconds", type=float, default=600.0, help="time during which synthetic and ServeGen requests arrive")
    add("--cv", type=float, default=1.0, help="variation of the gaps; 1 is Poisson")
    add("--shape", choices=[shape.value for shape in Shape], default="steady", help="how the rate moves")
    add("--zipf", type=float, default=1.0, help="skew of the models' popularity; 0 is uniform")
    add("--tenants", type=int, default=1)
    add("--batch-part", type=float, default=0.0, help="part of the requests in class batch-1m")


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        simulation, outcome = run(options)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"nearline simulate: {error}\n")
        return 2
    found: dict[str, Any] = {"policy": options.policy, **report(simulation, outcome)}
    text = json.dumps(found, indent=2) + "\n"
    if options.json is not None:
        options.json.write_text(text)
    else:
        sys.stdout.write(text)
    if options.plot is not None:
        title = f"{len(simulation.core.fleet.models)} models on {len(simulation.nodes)} nodes, policy {options.policy}"
        try:
            plot_ttft(outcome, options.plot, title)
        except ImportError:
            sys.stderr.write("nearline simulate: no plot, matplotlib is not installed; `pip install matplotlib`\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m nearline.simulator`: one run of a trace or of synthetic traffic over a fleet, its outcome as JSON."""

import argparse
import difflib
import gc
import json
import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from nearline.simulator.report import attained, report
from nearline.simulator.stepped import stepped
from nearline.simulator.traces import Spread, read_trace

_OVERLOADED = 0.9
"""A run that keeps fewer of its promises than this says so."""

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
    config = CoreConfig()
    names = [field.name for field in fields(CoreConfig) if isinstance(getattr(config, field.name), (int, float))]
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=5, cutoff=0.5) or sorted(names)
            raise ValueError(f"--set {name!r} is no number of the policy; there is {', '.join(near)}")
        try:
            config = replace(config, **{name: type(getattr(config, name))(value)})
        except ValueError as error:
            raise ValueError(f"--set {setting}: {error}") from None
    return config


def number(least: float, most: float = math.inf, is_open: bool = False) -> Callable[[str], float]:
    """An argument's type: a number from `least` (beyond it, if `is_open`) to `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not least <= value <= most or (is_open and value == least) or math.isinf(value):
            bounds = f"more than {least:g}" if is_open else f"at least {least:g}"
            bounds += "" if math.isinf(most) else f" and at most {most:g}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: it must be {bounds}")
        return value

    return read


def count(text: str) -> int:
    """An argument's type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names every default, except that there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, []) else super()._get_help_string(action)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    return _parser().parse_args(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nearline simulate",
        description="Run the controller's own policies on a trace, or on synthetic traffic, in virtual time.",
        formatter_class=_Help,
    )
    add = parser.add_argument
    add("--fleet", type=Path, help="a TOML file of nodes and models; it replaces the options of the fleet below")
    add("--policy", choices=sorted(POLICIES), default="nearline", help="who decides; single ideas are for comparison")
    add("--detail", choices=sorted(DETAILS), default="fast", help="engine: the engine's own scheduler, step by step")
    fleet, positive = parser.add_argument_group("an equal fleet").add_argument, number(0, is_open=True)
    fleet("--models", type=count, default=20, help="how many equal models")
    fleet("--nodes", type=count, default=4, help="how many equal machines")
    fleet("--slots", type=count, default=1, help="instances per node")
    fleet("--dram-gb", type=number(0), default=64.0, help="DRAM pool per node")
    fleet("--model-gb", type=positive, default=14.0, help="bytes of each model")
    fleet("--profile", choices=sorted(PROFILES), default="a10g-7b", help="how fast an instance is")
    fleet("--keep-alive", type=number(-1), default=300.0, help="seconds an idle instance stays; -1: always")
    fleet("--max-replicas", type=count, default=1, help="instances of one model at most")
    add_traffic(parser)
    add("--lose-node-every", type=number(0), default=0.0, metavar="S", help="mean time between node losses; 0: never")
    add("--cancel", type=number(0, 1), default=0.0, metavar="PART", help="part of the callers that hang up early")
    add("--set", action="append", default=[], metavar="NAME=NUMBER", help="a number of the core's policy; repeatable")
    add("--plot", type=Path, metavar="FILE", help="draw the run as PNG or SVG (needs matplotlib)")
    add("--json", type=Path, metavar="FILE", help="write the outcome there instead of printing it")
    add("--seed", type=int, default=1, help="of all that is drawn")
    return parser


def add_traffic(parser: argparse.ArgumentParser) -> None:
    add, positive = parser.add_argument_group("traffic").add_argument, number(0, is_open=True)
    add("--trace", type=Path, help="Azure LLM csv, Mooncake jsonl, VTC jsonl, or a ServeGen directory; else synthetic")
    add("--speedup", type=positive, default=1.0, help="divide a trace's times by this")
    add("--max-requests", type=count, help="cut a trace after so many")
    add("--rate", type=positive, default=0.5, help="requests per second, all models together")
    add("--seconds", type=positive, default=600.0, help="time during which synthetic and ServeGen requests arrive")
    add("--cv", type=positive, default=1.0, help="variation of the gaps; 1 is Poisson")
    add("--shape", choices=[shape.value for shape in Shape], default="steady", help="how the rate moves")
    add("--zipf", type=number(0), default=1.0, help="skew of the models' popularity; 0 is uniform")
    add("--tenants", type=count, default=1, help="how many tenants the requests are of")
    add("--batch-part", type=number(0, 1), default=0.0, help="part of the requests in class batch-1m")


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        simulation, outcome = run(options)
    except OSError as error:
        sys.stderr.write(f"nearline simulate: cannot read {error.filename}: {error.strerror}\n")
        return 2
    except ValueError as error:
        sys.stderr.write(f"nearline simulate: {error}\n")
        return 2
    found: dict[str, Any] = {"policy": options.policy, **report(simulation, outcome)}
    text = json.dumps(found, indent=2) + "\n"
    if options.json is not None:
        try:
            options.json.write_text(text)
        except OSError as error:
            sys.stderr.write(f"nearline simulate: cannot write {options.json}: {error.strerror}\n")
            return 2
    else:
        sys.stdout.write(text)
    if (kept := attained(simulation)) < _OVERLOADED:
        cure = "try a lower --rate, or more --nodes or --slots"
        sys.stderr.write(f"nearline simulate: only {kept:.0%} of the promises were kept; {cure}\n")
    if options.plot is not None:
        title = f"{len(simulation.core.fleet.models)} models on {len(simulation.nodes)} nodes, policy {options.policy}"
        try:
            plot_ttft(outcome, options.plot, title)
        except ImportError:
            sys.stderr.write("nearline simulate: no plot, matplotlib is not installed; `pip install matplotlib`\n")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has seen enough: end without a word
    sys.exit(main(sys.argv[1:]))

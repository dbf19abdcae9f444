"""How fast virtual time runs: requests per core-second on 1,000 models and 100 nodes, and where the time goes.

Usage: python -m benchmarks.simulator_speed [--seconds 400]     Writes benchmarks/results/simulator_speed.md.
The controller's whole core decides every request. Traffic is drawn within the time measured; cold starts are too.
Measured twice: as Python runs it, and compiled by mypyc (`make compiled`; building takes a minute or two, before).
"""

import argparse
import cProfile
import json
import os
import pstats
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from nearline.controller import core
from nearline.simulator.__main__ import parse, run
from nearline.simulator.compiled import DIRECTORY, build

AIM = 20_000
NUM_RUNS = 3
FLEET = "--models 1000 --nodes 100 --slots 10 --model-gb 14 --dram-gb 200 --keep-alive 600 --zipf 0.5 --rate 200"
ROOMS = ("controller", "simulator", "node_agent", "checkpoint_store", "protocol")


def speed(seconds: float) -> dict[str, Any]:
    """One run in this process: its requests, processor time, peak memory, and the digest of what was decided."""
    options = parse([*FLEET.split(), "--seconds", str(seconds)])
    began = time.process_time()
    _, outcome = run(options)
    return {
        "is_compiled": not core.__file__.endswith(".py"),
        "requests": outcome.num_arrived,
        "spent_s": time.process_time() - began,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "digest": outcome.digest,
    }


def speed_apart(seconds: float, directory: Path | None) -> dict[str, Any]:
    """One run in a process of its own, over the packages in `directory`, or the sources."""
    command = [sys.executable, "-m", "benchmarks.simulator_speed", "--one", "--seconds", str(seconds)]
    environment = {**os.environ, **({} if directory is None else {"PYTHONPATH": str(directory.resolve())})}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    if found["is_compiled"] != (directory is not None):
        raise RuntimeError("the run did not use the packages it was to measure")
    return found


def shares(seconds: float) -> dict[str, float]:
    """Part of the time spent in each room's own functions."""
    profile = cProfile.Profile()
    options = parse([*FLEET.split(), "--seconds", str(seconds)])
    profile.runcall(run, options)
    spent = dict.fromkeys((*ROOMS, "elsewhere"), 0.0)
    for (file, _, _), row in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        room = next((name for name in ROOMS if f"/{name}/" in file), "elsewhere")
        spent[room] += row[2]
    total = sum(spent.values())
    return {room: part / total for room, part in spent.items()}


def verdict(how: str, runs: list[dict[str, Any]]) -> str:
    best = max(run["requests"] / run["spent_s"] for run in runs)
    return f"{how}: {'met' if best >= AIM else 'missed'}, {best / AIM:.2f} of it at best."


def main() -> Path | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=400.0, help="virtual time of each run")
    parser.add_argument("--one", action="store_true", help="run once, here, and print what was measured as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(speed(options.seconds)))
        return None
    ways = {"interpreted": None, "compiled": build(DIRECTORY)}
    runs = {how: [speed_apart(options.seconds, where) for _ in range(NUM_RUNS)] for how, where in ways.items()}
    if len({run["digest"] for each in runs.values() for run in each}) != 1:
        raise RuntimeError(f"the runs decided differently: {runs}")
    header = ["how", "requests", "core-seconds", "requests per core-second", "peak memory"]
    rows = [
        [how, f"{n:,}", f"{spent_s:.2f}", f"{n / spent_s:,.0f}", f"{run['peak_mib']:.0f} MiB"]
        for how, each in runs.items()
        for run in each
        for n, spent_s in [(run["requests"], run["spent_s"])]
    ]
    where = ", ".join(f"{room} {100 * part:.0f} %" for room, part in shares(options.seconds / 4).items())
    verdicts = " ".join(verdict(how.capitalize(), each) for how, each in runs.items())
    body = f"""{record.table(header, rows)}

Aim: {AIM:,} requests per core-second. {verdicts}

Interpreted: the sources, as Python {sys.version.split()[0]} runs them. Compiled: the same modules through mypyc, which
needs a C compiler (`make compiled`). All runs took the same decisions: digest `{runs["compiled"][0]["digest"]}`.

Own time by room, interpreted: {where}.

Fleet and traffic: `{FLEET}`."""
    return record.write("simulator_speed", "Simulated traffic per core-second", body)


if __name__ == "__main__":
    found = main()
    if found is not None:
        print(found)

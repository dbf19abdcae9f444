"""How fast virtual time runs: requests per core-second on 1,000 models and 100 nodes, and where the time goes.

Usage: python -m benchmarks.simulator_speed [--seconds 400]     Writes benchmarks/results/simulator_speed.md.
The controller's whole core decides every request. Traffic is drawn within the time measured; cold starts are too.
"""

import argparse
import cProfile
import pstats
import time
from pathlib import Path

from benchmarks import record
from nearline.simulator.__main__ import parse, run

AIM = 20_000
FLEET = "--models 1000 --nodes 100 --slots 10 --model-gb 14 --dram-gb 200 --keep-alive 600 --zipf 0.5 --rate 200"
ROOMS = ("controller", "simulator", "node_agent", "checkpoint_store", "protocol")


def speed(seconds: float) -> tuple[int, float]:
    """Requests of a run, and the processor time it took."""
    options = parse([*FLEET.split(), "--seconds", str(seconds)])
    began = time.process_time()
    _, outcome = run(options)
    return outcome.num_arrived, time.process_time() - began


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


def main() -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=400.0, help="virtual time of each run")
    options = parser.parse_args()
    runs = [speed(options.seconds) for _ in range(3)]
    best = max(requests / spent_s for requests, spent_s in runs)
    rows = [[f"{requests:,}", f"{spent_s:.2f}", f"{requests / spent_s:,.0f}"] for requests, spent_s in runs]
    where = ", ".join(f"{room} {100 * part:.0f} %" for room, part in shares(options.seconds / 4).items())
    verdict = f"Aim: {AIM:,} requests per core-second: {'met' if best >= AIM else 'missed'}, {best / AIM:.2f} of it."
    table = record.table(["requests", "core-seconds", "requests per core-second"], rows)
    body = f"{table}\n\n{verdict}\n\nOwn time by room: {where}.\n\nFleet and traffic: `{FLEET}`."
    return record.write("simulator_speed", "Simulated traffic per core-second", body)


if __name__ == "__main__":
    print(main())

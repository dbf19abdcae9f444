"""Shortest predicted first: how much sooner jobs complete, with predictions that were published.

Usage: python -m benchmarks.evidence.ssjf --data DIRECTORY
The order of jobs is the controller's own `shortest_first`. Writes benchmarks/evidence/ssjf.md.
Source: [ssjf] shipped predictions, job time 0.1 s + 0.02 s per token, runs of 50 jobs, Poisson arrivals, one server.
"""

import csv
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean

from benchmarks import record
from benchmarks.evidence import page
from benchmarks.evidence.options import data_directory
from nearline.controller.policy.prediction import OVERTAKE_FRACTION, bucket_of, shortest_first

NUM_JOBS, NUM_RUNS = 50, 400
RATES = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
GUARD_S = 100.0
FILES = {"3 classes": "predictions_warmup_cls_1000K.csv", "5 classes": "predictions_warmup_multi_cls_1000K.csv"}
THREE_CUTS, FIVE_CUTS = (141, 503), (42, 141, 294, 503)
"""Upper ends of the published classes, in tokens."""
AIM = (0.30, 0.40)


@dataclass(frozen=True, slots=True)
class Job:
    """One job: what `shortest_first` looks at, and the truth."""

    order: int
    arrived_at: float
    length_bucket: int
    target_s: float
    seconds: float


Row = tuple[int, int]
"""Actual tokens, predicted class."""


def read(path: Path) -> list[Row]:
    with path.open() as file:
        rows = csv.DictReader(file)
        return [(int(float(row["output_token_length"])), int(float(row["predicted_length"]))) for row in rows]


def mean_completion_s(jobs: Sequence[Job]) -> float:
    """Serve jobs one at a time, the next one as the controller's policy says; mean time from arrival to end."""
    coming, waiting, now, total = list(jobs), list[Job](), 0.0, 0.0
    while coming or waiting:
        while coming and coming[0].arrived_at <= now:
            waiting.append(coming.pop(0))
        if not waiting:
            now = coming[0].arrived_at
            continue
        job = shortest_first(waiting, now)[0]
        waiting.remove(job)
        now += job.seconds
        total += now - job.arrived_at
    return total / len(jobs)


def reduction(rows: Sequence[Row], rate: float, bucket: Callable[[Row], int], guard_s: float = GUARD_S) -> float:
    """Part by which the mean completion time falls against first come, first served, over `NUM_RUNS` runs."""
    stream, ours, fcfs = Random(f"ssjf/{rate}"), [], []
    for _ in range(NUM_RUNS):
        picked, now, jobs = stream.choices(rows, k=NUM_JOBS), 0.0, []
        for order, row in enumerate(picked):
            now += stream.expovariate(rate)
            jobs.append(Job(order, now, bucket(row), guard_s / OVERTAKE_FRACTION, 0.1 + 0.02 * row[0]))
        ours.append(mean_completion_s(jobs))
        fcfs.append(mean_completion_s([Job(j.order, j.arrived_at, 0, j.target_s, j.seconds) for j in jobs]))
    return 1.0 - fmean(ours) / fmean(fcfs)


PUBLISHED = "30.5 to 39.6 % (abstract)"
WHY = """Means of 400 runs of 50 jobs per cell. The published figure spans systems with and without batching and its own
arrival processes; ours is one server without batching and honest Poisson arrivals (the artifact draws counts per whole
second). The guard lets only older jobs overtake one that has waited 100 s. With 50 jobs the queue at high rates is one
burst, so the gain levels off. What three classes as shipped lack against perfect lengths is 9 to 11 points the
classes' fault and 5 to 7 the predictor's. A constant predictor gives exactly 0 and an inverted one is worse than first
come, first served: the gain is the prediction's."""


def judged(name: str, found: Sequence[float]) -> str:
    """Say whether the shipped predictions of one kind reach the aim at every load."""
    is_met = AIM[0] <= min(found) and max(found) <= AIM[1]
    return f"{name} {100 * min(found):.1f} to {100 * max(found):.1f} %, {'met' if is_met else 'missed'}"


def main(directory: Path) -> Path:
    tables = {name: read(directory / "ssjf" / file) for name, file in FILES.items()}
    rows, shipped = [], {"5 classes": list[float](), "3 classes": list[float]()}
    for rate in RATES:
        three, five = tables["3 classes"], tables["5 classes"]
        cells = [
            reduction(five, rate, lambda row: row[0]),
            reduction(five, rate, lambda row: row[1]),
            reduction(five, rate, lambda row: bisect_left(FIVE_CUTS, row[0])),
            reduction(three, rate, lambda row: row[1]),
            reduction(three, rate, lambda row: bisect_left(THREE_CUTS, row[0])),
            reduction(five, rate, lambda row: bucket_of(row[0])),
            reduction(five, rate, lambda _: 0),
            reduction(five, rate, lambda row: -row[1]),
        ]
        if rate >= 0.5:
            shipped["5 classes"].append(cells[1])
            shipped["3 classes"].append(cells[3])
        rows.append([f"{rate:g}", PUBLISHED if rate >= 0.5 else "–", *(f"{100 * cell:.1f} %" for cell in cells)])
    header = ["jobs/s", "published", "perfect", "shipped, 5 classes", "perfect, 5 classes",
              "shipped, 3 classes", "perfect, 3 classes", "perfect, our buckets", "constant", "inverted"]  # fmt: skip
    verdict = "Aim: completion time 30 to 40 % lower at every load from 0.5 jobs/s on, from shipped predictions: "
    verdict += "; ".join(judged(name, found) for name, found in shipped.items()) + "."
    command = "python -m benchmarks.evidence.ssjf --data DIRECTORY"
    return page.write("ssjf", "Shortest predicted first", command,
                      ["Mean job completion time, reduction against first come, first served.",
                       record.table(header, rows), verdict, WHY])  # fmt: skip


if __name__ == "__main__":
    print(main(data_directory(__doc__)))

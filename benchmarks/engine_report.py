"""What benchmarks/engine.py found, held against its aims: tables and a plot."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import record

FLOORS = """Why speed misses are missed: the floor is the longer of reading every weight once and of the products alone,
at the read bandwidth and at the product rate (large, in cache, by our own kernel) measured in this run; attention and
all else come on top."""
PARTS = ("schedule", "forward", "logits", "sample", "commit", "rest")
"""What a step calls, and what is left: packing, and the loop itself."""
Seconds = dict[tuple[str, str], list[float]]
BF16, INT8, INT4 = "nearline bf16", "nearline int8", "nearline int4"
SIXTEEN_BITS = ("llama.cpp BF16", "llama.cpp F16")
ALL = ("decode 1", "decode 8", "decode 32", "prefill")
ASKED_ONCE = {
    "llama.cpp F16": ALL, "transformers-cb": ("decode 8",), "ctranslate2-float32": ALL, "ctranslate2-int8": ALL,
}  # fmt: skip
"""Rivals that are asked in the first round only, to keep a run short, and what."""
PREFILL_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Aim:
    """Our `measure` should be at least `times` as fast as that of the fastest of `rivals`."""

    ours: str
    measure: str
    rivals: Sequence[str]
    times: float


AIMS = (
    *(Aim(BF16, f"decode {b}", SIXTEEN_BITS, times) for b, times in ((1, 1.3), (8, 2.5), (32, 4.0))),
    Aim(BF16, "prefill", SIXTEEN_BITS, 4.0),
    *(Aim(INT8, f"decode {b}", ("llama.cpp Q8_0",), times) for b, times in ((1, 1.0), (8, 2.0))),
    *(Aim(INT4, f"decode {b}", ("llama.cpp Q4_1",), times) for b, times in ((1, 0.9), (8, 1.5))),
    *(Aim(BF16, f"decode {b}", ("transformers",), 3.5) for b in (1, 8, 32)),
    Aim(BF16, "decode 8", ("transformers-cb",), 1.0),
    *(Aim(BF16, f"decode {b}", ("ctranslate2-float32",), 1.0) for b in (1, 8, 32)),
    *(Aim(INT8, f"decode {b}", ("ctranslate2-int8",), 1.0) for b in (1, 8, 32)),
)
TRAFFIC = (
    ("floor", "batch 1, bf16: weight bytes / read bandwidth, over the step", 0.75, True),
    ("busy 1", "batch 1 beside a busy process, share of undisturbed", 0.45, True),
    ("busy 8", "batch 8 beside a busy process, share of undisturbed", 0.45, True),
    ("gap", "four streams, a 2,000-token prompt arrives: longest gap / TPOT target", 2.0, False),
    ("prefix", "second request with 1,000 shared tokens: TTFT / first's", 0.2, False),
)
"""Key, what it is, aim, whether more is better."""


def report(
    seconds: Seconds,
    traffic: dict[str, list[float]],
    parts: dict[int, dict[str, float]],
    floors: dict[str, float],
    notes: dict[str, str],
) -> str:
    """Say everything as Markdown; `floors` are the seconds in which our own kernels could not do less, by measure."""
    engines = ["Engines:", "", *(f"- {k}: {v}" for k, v in notes.items())]
    return "\n".join(
        [_aims(seconds, traffic), "", _why(seconds, floors), "", _parts(parts), "", _speeds(seconds), "", *engines]
    )


def _why(seconds: Seconds, floors: dict[str, float]) -> str:
    """Hold every missed bf16 aim against what reading the weights once, or their products alone, would take."""
    rows = []
    for aim in AIMS:
        values = ratios(seconds, aim)
        if aim.ours != BF16 or aim.measure not in floors or not values or statistics.median(values) >= aim.times:
            continue
        ours_s, floor_s = statistics.median(seconds[aim.ours, aim.measure]), floors[aim.measure]
        wanted_s = ours_s * statistics.median(values) / aim.times
        cells = [f"{1e3 * value:.1f}" for value in (wanted_s, ours_s, floor_s)]
        verdict = "is below the floor" if wanted_s < floor_s else f"asks for {floor_s / wanted_s:.2f} of the floor"
        rows.append([f"{_title(aim.measure)} / {aim.rivals[0]}", *cells, f"{floor_s / ours_s:.2f}", verdict])
    if not rows:
        return "No speed aim of bf16 is missed."
    head = ["missed", "aim, ms", "ours, ms", "floor, ms", "ours is at", "the aim"]
    return FLOORS + "\n\n" + record.table(head, rows)


def _parts(parts: dict[int, dict[str, float]]) -> str:
    rows = [[f"batch {batch}", *(f"{1e3 * s:.2f}" for s in found.values())] for batch, found in parts.items()]
    names = list(next(iter(parts.values())))
    return record.table(["our bf16 step, ms in", *names], rows)


def tokens_per_s(measure: str, value: float) -> float:
    """Turn seconds per step, or of a prefill, into tokens per second."""
    return (PREFILL_TOKENS if measure == "prefill" else int(measure.split()[1])) / value


def ratios(seconds: Seconds, aim: Aim) -> list[float]:
    """Rival's seconds over ours, round by round, against the rival that is fastest in the median."""
    ours = seconds.get((aim.ours, aim.measure), [])
    found = [seconds[rival, aim.measure] for rival in aim.rivals if (rival, aim.measure) in seconds]
    if not ours or not found:
        return []
    return [rival / our for our, rival in zip(ours, min(found, key=statistics.median), strict=False)]


def _aims(seconds: Seconds, traffic: dict[str, list[float]]) -> str:
    rows = []
    for aim in AIMS:
        values = ratios(seconds, aim)
        if values:
            what = f"{aim.ours.split()[1]} {_title(aim.measure)} / {' or '.join(aim.rivals)}"
            rows.append([what, f"≥ {aim.times:g} ×", _spread(values), _verdict(values, aim.times, True)])
    for key, what, bound, is_more_better in TRAFFIC:
        if key in traffic:
            sign = "≥" if is_more_better else "≤"
            values = traffic[key]
            rows.append([what, f"{sign} {bound:g}", _spread(values), _verdict(values, bound, is_more_better)])
    return record.table(["what", "aim", "measured: median (min–max)", "met"], rows)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _verdict(values: Sequence[float], bound: float, is_more_better: bool) -> str:
    middle = statistics.median(values)
    is_met = middle >= bound if is_more_better else middle <= bound
    share = middle / bound if is_more_better else bound / middle
    return "yes" if is_met else f"no: {share:.2f} of the aim"


def _speeds(seconds: Seconds) -> str:
    measures = list(dict.fromkeys(measure for _, measure in seconds))
    rows = []
    for label in dict.fromkeys(label for label, _ in seconds):
        cells = []
        for measure in measures:
            values = seconds.get((label, measure))
            cells.append(f"{tokens_per_s(measure, statistics.median(values)):.0f}" if values else "–")
        rows.append([label, *cells])
    return record.table(["tokens/s, median", *map(_title, measures)], rows)


def _title(measure: str) -> str:
    return "prefill" if measure == "prefill" else f"batch {measure.split()[1]}"


def plot(seconds: Seconds, path: Path) -> None:
    """Draw tokens per second of every engine, one panel per measure."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "nearline"
    import matplotlib.pyplot as plt

    measures = list(dict.fromkeys(measure for _, measure in seconds))
    labels = list(dict.fromkeys(label for label, _ in seconds))[::-1]
    figure, axes = plt.subplots(1, len(measures), figsize=(3.2 * len(measures) + 1.5, 0.32 * len(labels) + 1.2))
    for axis, measure in zip(axes, measures, strict=True):
        for row, label in enumerate(labels):
            values = seconds.get((label, measure))
            if values:
                speed = tokens_per_s(measure, statistics.median(values))
                axis.barh(row, speed, color="#1f77b4" if label.startswith("nearline") else "#b0b0b0")
                axis.text(speed, row, f" {speed:.0f}", va="center", fontsize=7)
        axis.set_title(f"{_title(measure)}, tokens/s", fontsize=9)
        axis.set_yticks(range(len(labels)), labels if axis is axes[0] else [""] * len(labels), fontsize=8)
        axis.tick_params(axis="x", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.18)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)

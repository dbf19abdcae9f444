"""What the multi-LoRA measurement found, as text and as a picture: every aim with its number and whether it is met."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import record
from nearline.engine.config import MergeMode

if TYPE_CHECKING:
    from benchmarks.multi_lora import Found

_NAMES = {0: "base", -1: "merged"}
_COLOURS = {"zipf": "#1f6f8b", "uniform": "#e0a458"}
_MODE_COLOURS = {MergeMode.NEVER: "#b8b8b8", MergeMode.ALWAYS: "#e0a458", MergeMode.AUTO: "#1f6f8b"}


WHY = """Beyond the places, a first use reads an adapter again and waits for a place: the figure shows what that costs.
Dynamic switching is opt-in. Of the same arrivals it can gain over unmerged no more than the adapter kernels of a lone
adapter cost, here {} % of a step at batch 8 and {} % at 32; steps of several adapters are the same in both. First use
from DRAM means through the page cache: 10 MB are copied into memory touched ahead, in one piece."""


def write(found: Found, folder: Path | None = None) -> Path:
    """Write multi_lora.md and multi_lora.svg; return the first."""
    folder = folder or record.RESULTS
    path = record.write("multi_lora", "Many adapters on one base", _body(found), folder)
    _draw(found, folder / "multi_lora.svg")
    return path


def _body(found: Found) -> str:
    parts = [
        record.table(("aim", "aimed at", "measured", "met"), _aims(found)),
        "## Decode speed, rank 16 on all seven projections",
        record.table(("batch", "distinct adapters", "tokens/s", "of base: median (range)"), _speeds(found)),
        "## First use of an adapter: added to the time to the first token, ms, median (range)",
        record.table(("from", "ms"), [[k, record.spread(v)] for k, v in found.first_use_s.items()]),
        f"## {max(found.size.num_registered)} registered adapters (rank 8 on q and v, {found.num_resident} places), "
        f"imported in {found.registering_s:.0f} s",
        record.table(("popularity", "registered", "tokens/s", "of 10", "loads"), _popularity(found)),
        "## Dynamic switching: 8 adapters, requests in runs of one adapter, at 70 % load; mean latency, s",
        record.table(("run", "unmerged only", "merged only", "dynamic", "merged steps, dynamic"), _switching(found)),
    ]
    if found.peft:
        rows = [[str(b), f"{v:.1f}", f"{statistics.median(found.speeds[b, 8]):.0f}"] for b, v in found.peft.items()]
        parts += [
            "## peft, `adapter_names=`, 8 adapters, the same machine and run (tokens/s, its prefill included)",
            record.table(("batch", "peft", "ours"), rows),
        ]
    return "\n\n".join([*parts, _why(found), "![figures](multi_lora.svg)"])


def _ratios(found: Found, batch: int, distinct: int) -> list[float]:
    pairs = zip(found.speeds[batch, distinct], found.speeds[batch, 0], strict=True)
    return [value / base for value, base in pairs]


def _aims(found: Found) -> list[list[str]]:
    rows = []
    for distinct, aim in ((1, 0.85), (8, 0.80), (32, 0.70), (-1, 0.98)):
        value = statistics.median(_ratios(found, 32, distinct))
        name = _NAMES.get(distinct, f"{distinct} distinct adapters")
        rows.append(_aim(f"batch 32, {name}: share of base", value, aim, ""))
    for batch, theirs in found.peft.items():
        rows.append(
            _aim(f"times peft at batch {batch}", statistics.median(found.speeds[batch, 8]) / theirs, 12.0, " ×")
        )
    for tier, most in (("SSD", 15.0), ("DRAM", 3.0)):
        rows.append(
            _aim(f"first use from {tier}", 1e3 * statistics.median(found.first_use_s[tier]), most, " ms", False)
        )
    few = min(found.size.num_registered)
    many = max(count for count in found.size.num_registered if count <= found.num_resident)
    for kind in ("zipf", "uniform"):
        share = found.popularity[kind, many].tokens_per_s / found.popularity[kind, few].tokens_per_s
        rows.append(_aim(f"{many} registered, which fit, against {few}, {kind}", share, 0.9, ""))
    for stride in found.size.strides:
        worst = max(_against(found, stride, mode) for mode in (MergeMode.NEVER, MergeMode.ALWAYS))
        rows.append(_aim(f"dynamic over the better of both, runs of {stride}", worst, 1.0, "", False))
    return rows


def _against(found: Found, stride: int, mode: MergeMode) -> float:
    """Dynamic's mean latency over that of `mode`, of the same arrivals; the median of the rounds."""
    pairs = zip(found.switching[stride, MergeMode.AUTO], found.switching[stride, mode], strict=True)
    return statistics.median(dynamic.mean_latency_s / other.mean_latency_s for dynamic, other in pairs)


def _aim(what: str, value: float, aim: float, unit: str, is_least: bool = True) -> list[str]:
    is_met = value >= aim if is_least else value <= aim
    by = "yes" if is_met else f"no, by {abs(value - aim):.2f}{unit}"
    return [what, f"{'≥' if is_least else '≤'} {aim:g}{unit}", f"{value:.2f}{unit}", by]


def _speeds(found: Found) -> list[list[str]]:
    rows = []
    for (batch, distinct), values in found.speeds.items():
        ratios = _ratios(found, batch, distinct)
        share = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        rows.append([str(batch), _NAMES.get(distinct, str(distinct)), f"{statistics.median(values):.0f}", share])
    return rows


def _popularity(found: Found) -> list[list[str]]:
    rows = []
    few = min(found.size.num_registered)
    for (kind, count), outcome in found.popularity.items():
        share = outcome.tokens_per_s / found.popularity[kind, few].tokens_per_s
        rows.append([kind, str(count), f"{outcome.tokens_per_s:.0f}", f"{share:.2f}", str(outcome.num_loads)])
    return rows


def _switching(found: Found) -> list[list[str]]:
    rows = []
    for stride in found.size.strides:
        cells = [f"{_latency_s(found, stride, mode):.2f}" for mode in _MODE_COLOURS]
        dynamic = found.switching[stride, MergeMode.AUTO]
        merged, steps = sum(one.num_merged_steps for one in dynamic), sum(one.num_steps for one in dynamic)
        rows.append([str(stride), *cells, f"{merged} of {steps}"])
    return rows


def _latency_s(found: Found, stride: int, mode: MergeMode) -> float:
    return statistics.fmean(outcome.mean_latency_s for outcome in found.switching[stride, mode])


def _why(found: Found) -> str:
    costs = [100 * (1 - statistics.median(_ratios(found, batch, 1))) for batch in (8, 32)]
    return WHY.format(*(f"{cost:.0f}" for cost in costs))


def _draw(found: Found, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4))
    keys = [key for key in found.speeds if key[0] == 32]
    names = [_NAMES.get(distinct, str(distinct)) for _, distinct in keys]
    left.bar(names, [statistics.median(found.speeds[key]) for key in keys], color="#1f6f8b")
    left.set(title="decode at batch 32", xlabel="distinct adapters", ylabel="tokens/s")
    for kind, colour in _COLOURS.items():
        speeds = [found.popularity[kind, count].tokens_per_s for count in found.size.num_registered]
        middle.plot(found.size.num_registered, speeds, marker="o", color=colour, label=kind)
    middle.axvline(found.num_resident, color="#b8b8b8", linestyle=":", label="places")
    middle.set(title="registered adapters", xlabel="registered", ylabel="tokens/s", xscale="log", ylim=(0, None))
    middle.legend()
    for mode, colour in _MODE_COLOURS.items():
        means = [_latency_s(found, stride, mode) for stride in found.size.strides]
        right.plot(found.size.strides, means, marker="o", color=colour, label=f"--merge {mode}")
    right.set(title="8 adapters in runs", xlabel="requests per run", ylabel="mean latency, s", ylim=(0, None))
    right.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)

"""What the multi-LoRA measurement found, as text and as a picture: every aim with its number and whether it is met."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import record
from benchmarks.multi_lora_switching import LOAD, Mode
from nearline.engine.config import MergeMode

if TYPE_CHECKING:
    from benchmarks.multi_lora import Found

_NAMES = {0: "base", -1: "merged"}
_COLOURS = {"zipf": "#1f6f8b", "uniform": "#e0a458"}
_MODES: dict[Mode, tuple[str, str]] = {
    MergeMode.NEVER: ("unmerged only", "#b8b8b8"),
    MergeMode.ALWAYS: ("merged only", "#e0a458"),
    MergeMode.AUTO: ("dynamic", "#1f6f8b"),
    None: ("no adapters", "#7fb069"),
}


WHY = """Beyond the places, a first use reads an adapter again and waits for a place: the figure shows what that costs.
First use from DRAM: 10 MB are copied out of the DRAM pool into memory touched ahead; from SSD the store brings them
into the pool first, the page cache dropped. Each stands against the same request just before and just after it, when
the adapter is there; the places take turns. Read ahead, the request comes when the reading has ended.

Switching: the skew of dLoRA's figure 10, functions dealt to 8 adapters in strides, in the order of a sample of the
trace it used; with 31 functions a stride of 32 leaves one adapter. At {:.1f} requests per second, {} % of what the
unmerged engine carries; the modes take turns in every round, of the same arrivals. Dynamic merges the steps that
serve one adapter anyway and holds nobody back. It is opt-in, because the copy's weights are rounded: at near ties
a token may depend on who else was there. No step is quicker than the base's own, so "no adapters" bounds what quicker
steps can gain; its latency over the better mode's is {}. {}"""


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
        "## First use of an adapter: added to the time to the first token, ms, median (quartiles)",
        record.table(("from", "ms"), [[k, record.quartiles(v)] for k, v in found.first_use_s.items()]),
        f"## {max(found.size.num_registered)} registered adapters (rank 8 on q and v, {found.num_resident} places), "
        f"imported in {found.registering_s:.0f} s",
        record.table(("popularity", "registered", "tokens/s", "of 10", "loads"), _popularity(found)),
        f"## Dynamic switching: 8 adapters by skew, at {100 * LOAD:.0f} % load; mean latency after the first round, s",
        record.table(("stride", *(name for name, _ in _MODES.values()), "merged steps, dynamic"), _switching(found)),
        "Over the better of unmerged only and merged only: median (range) of the rounds after the first",
        record.table(("stride", "dynamic", "no adapters", "dynamic, first round"), _against_both(found)),
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
        ratio = statistics.median(_ratios_to_best(found, stride, MergeMode.AUTO)[1:])
        rows.append(_aim(f"dynamic over the better of both, stride {stride}", ratio, 1.0, "", False))
    return rows


def _ratios_to_best(found: Found, stride: int, mode: Mode) -> list[float]:
    """A mode's mean latency over that of the better pure mode, by round, of the same arrivals.

    The better one is the harder to beat, by the median of the rounds after the first: not anew by each round's chance.
    """
    outcomes = found.switching.outcomes

    def ratios(other: Mode) -> list[float]:
        pairs = zip(outcomes[stride, mode], outcomes[stride, other], strict=True)
        return [ours.mean_latency_s / theirs.mean_latency_s for ours, theirs in pairs]

    return max(
        (ratios(other) for other in (MergeMode.NEVER, MergeMode.ALWAYS)), key=lambda one: statistics.median(one[1:])
    )


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
        cells = [f"{_latency_s(found, stride, mode):.2f}" for mode in _MODES]
        dynamic = found.switching.outcomes[stride, MergeMode.AUTO][1:]
        merged, steps = sum(one.num_merged_steps for one in dynamic), sum(one.num_steps for one in dynamic)
        rows.append([str(stride), *cells, f"{merged} of {steps}"])
    return rows


def _against_both(found: Found) -> list[list[str]]:
    rows = []
    for stride in found.size.strides:
        ratios = [_ratios_to_best(found, stride, mode) for mode in (MergeMode.AUTO, None)]
        cells = [f"{statistics.median(r[1:]):.2f} ({min(r[1:]):.2f}–{max(r[1:]):.2f})" for r in ratios]
        rows.append([str(stride), *cells, f"{ratios[0][0]:.2f}"])
    return rows


def _latency_s(found: Found, stride: int, mode: Mode) -> float:
    """The median of the rounds after the first, in which copies are made."""
    return statistics.median(outcome.mean_latency_s for outcome in found.switching.outcomes[stride, mode][1:])


def _why(found: Found) -> str:
    bounds, worse = [], []
    for stride in found.size.strides:
        dynamic, bound = (_ratios_to_best(found, stride, mode)[1:] for mode in (MergeMode.AUTO, None))
        bounds.append(f"{statistics.median(bound):.2f} at stride {stride}")
        if statistics.median(dynamic) > 1.0:
            num_better = sum(ratio <= 1.0 for ratio in dynamic)
            worse.append(f"at stride {stride} in {num_better} of {len(dynamic)} rounds")
    verdict = "Dynamic is better at every stride."
    if worse:
        verdict = f"Where dynamic's median is above 1 it was better {', '.join(worse)}."
    load = round(100 * LOAD)
    return WHY.format(found.switching.requests_per_s, load, ", ".join(bounds), verdict)


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
    for mode, (name, colour) in _MODES.items():
        means = [_latency_s(found, stride, mode) for stride in found.size.strides]
        right.plot(found.size.strides, means, marker="o", color=colour, label=name)
    right.set(title="8 adapters, by skew", xlabel="functions per stride", ylabel="mean latency, s", ylim=(0, None))
    right.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)

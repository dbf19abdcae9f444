"""A live run and its simulation side by side, as the page has them."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from benchmarks import record
from benchmarks.evidence import page
from benchmarks.evidence.calibration_journal import Lived, Run, Timing
from benchmarks.evidence.calibration_machine import described, machine_of, profile_only, simulated

AIM, QUIET = 0.10, 0.05
AIMED = {"mean TTFT, s": "mean", "p90 TTFT, s": "p90", "swaps": "swaps"}
BESIDE = {"p50 TTFT, s": "p50", "mean time per output token, s": "tpot", "starts": "starts", "mean E2E, s": "e2e"}


def errors(live: Run, virtual: Run) -> dict[str, float]:
    """By how much the simulation differs from the live run, as a part of the latter."""
    real, made = live.measured(), virtual.measured()
    return {key: made[key] / real[key] - 1.0 for key in real}


def is_met(live: Run, virtual: Run) -> bool:
    found = errors(live, virtual)
    return all(abs(found[key]) <= AIM for key in AIMED.values())


def write(lived: Lived, command: str) -> Path:
    live, virtual = lived.run(), simulated(lived, *machine_of(lived))
    agreed = f"agreed: {'yes' if is_met(live, virtual) else 'no'}"
    machine, _ = machine_of(lived)
    over = (
        f"Machine: {record.machine()}. Three models in {_count(machine.num_slots, 'slot')}; {len(live.timings)} "
        f"requests of mixed classes in {lived.load_s / 60:.1f} minutes, all of them compared: first token and end as "
        "the controller saw them. Profiles, and a warm-up of other requests before these, are all that the simulation "
        "knows of the machine; of the load it knows when requests arrived and how long they were. Other processes used "
        f"{100 * lived.others[0]:.0f} % of the machine while it was measured and {100 * lived.others[1]:.0f} % during "
        "the load" + (": it was not quiet, and this says little." if max(lived.others) > QUIET else ".")
    )
    parts = [
        over,
        record.table(["", "live", "simulated", "error", "aim"], _rows(live, virtual)),
        f"Within 10 % on mean and p90 time to first token and on swaps; {agreed}.",
        "Where the difference is, by what a request met live (mean TTFT; the same requests on both sides):",
        record.table(
            ["", "requests", "live, s", "simulated, s", "part of the error of the mean"], _kinds(live, virtual)
        ),
        "The same requests simulated with less knowledge of the machine:",
        record.table(["known", "mean TTFT", "p90 TTFT", "swaps", "time per token"], _ablation(lived, live, virtual)),
        "Measured before the load and given to the simulation:",
        "\n".join(f"- {line}" for line in described(lived, *machine_of(lived))),
    ]
    return page.write("calibration", "The simulator against a live run", command, parts)


def _rows(live: Run, virtual: Run) -> list[list[str]]:
    real, made, found = live.measured(), virtual.measured(), errors(live, virtual)
    rows = []
    for name, key in (AIMED | BESIDE).items():
        verdict = "–" if key not in AIMED.values() else "met" if abs(found[key]) <= AIM else "missed"
        shown = [f"{side[key]:.0f}" if key in ("swaps", "starts") else f"{side[key]:.4f}" for side in (real, made)]
        rows.append([name, *shown, f"{100 * found[key]:+.1f} %", verdict])
    return rows


def _kinds(live: Run, virtual: Run) -> list[list[str]]:
    kinds: dict[str, Callable[[Timing], bool]] = {
        "instance there, nothing else under way": lambda t: not t.is_cold and not t.is_beside,
        "instance there, others under way": lambda t: not t.is_cold and t.is_beside,
        "start, nothing else under way": lambda t: t.is_cold and not t.is_beside,
        "start, behind others": lambda t: t.is_cold and t.is_beside,
    }
    pairs, rows = list(zip(live.timings, virtual.timings, strict=True)), []
    whole = sum(t.ttft_s for t in live.timings)
    for name, belongs in kinds.items():
        real, made = zip(*[(a.ttft_s, b.ttft_s) for a, b in pairs if belongs(a)], strict=True) or ((), ())
        if real:
            part = (sum(made) - sum(real)) / whole
            rows.append([name, str(len(real)), f"{fmean(real):.3f}", f"{fmean(made):.3f}", f"{100 * part:+.1f} %"])
    return rows


def _ablation(lived: Lived, live: Run, virtual: Run) -> list[list[str]]:
    machine, models = machine_of(lived)
    rows = {
        "all that was measured": virtual,
        "profiles and what the node says of binds": simulated(lived, *profile_only(lived)),
        "all, but `--detail fast`": simulated(lived, machine, models, is_fast=True),
    }
    found = {name: errors(live, run) for name, run in rows.items()}
    return [[name, *(f"{100 * error[key]:+.1f} %" for key in ("mean", "p90", "swaps", "tpot"))]
            for name, error in found.items()]  # fmt: skip


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"

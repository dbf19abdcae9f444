"""What the loading benchmark found, as text and as a picture: every aim with its number and whether it is met."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import record
from benchmarks.loading_rivals import READERS, version

Round = dict[str, float]
_OURS, _RIVAL, _LIMIT = "#1f6f8b", "#b8b8b8", "#e0a458"


@dataclass(frozen=True, slots=True)
class Found:
    """All rounds of all sections; times in seconds, rates in bytes per second."""

    num_bytes: int
    num_rounds: int
    rounds: dict[str, list[Round]]
    notes: list[str]
    prompt_tokens: int

    def values(self, section: str, key: str) -> list[float]:
        return [one[key] for one in self.rounds.get(section, []) if key in one]

    def median(self, section: str, key: str) -> float:
        return statistics.median(self.values(section, key))

    def ratio(self, section: str, of: Callable[[Round], float]) -> list[float]:
        """Compute a number of every round that has what it needs."""
        found = []
        for one in self.rounds.get(section, []):
            try:
                found.append(of(one))
            except (KeyError, ZeroDivisionError, statistics.StatisticsError):
                continue
        return found

    @property
    def rivals(self) -> list[str]:
        return [name for name in READERS if self.values("readers", f"{name} cold")]

    @property
    def limit(self) -> str:
        """The direct read that was the fastest by its median."""
        keys = {key for one in self.rounds["readers"] for key in one if key.startswith("fio")}
        return max(sorted(keys), key=lambda key: self.median("readers", key))


@dataclass(frozen=True, slots=True)
class Aim:
    what: str
    aim: float
    is_least: bool
    values: list[float]
    unit: str = ""
    limits: Sequence[float] = ()
    """What the device alone would have given, had we cost nothing; measured in the same rounds."""

    def row(self) -> list[str]:
        """Shape a row of the table: aim, measured (median and range), met or by how much not; and where the aim lies
        beyond what the device gives, that it does."""
        measured = statistics.median(self.values)
        verdict = "yes" if self._meets(measured) else f"no, by {abs(measured - self.aim):.3g}{self.unit}"
        if not self._meets(measured) and self.limits and not self._meets(statistics.median(self.limits)):
            verdict += f"; out of reach: the device alone gives {statistics.median(self.limits):.3g}{self.unit}"
        bound = "≥" if self.is_least else "≤"
        spread = f"{measured:.3g}{self.unit} ({min(self.values):.3g}–{max(self.values):.3g})"
        return [self.what, f"{bound} {self.aim:g}{self.unit}", spread, verdict]

    def _meets(self, value: float) -> bool:
        return value >= self.aim if self.is_least else value <= self.aim


def aims(found: Found) -> list[Aim]:
    """Hold every number against what was aimed for."""
    result = [*_reader_aims(found), *_other_aims(found)] if found.rivals or found.rounds else []
    return [aim for aim in result if aim.values]


def _reader_aims(found: Found) -> Iterable[Aim]:
    if "readers" not in found.rounds:
        return
    limit, size, rivals = found.limit, found.num_bytes, found.rivals

    def of_all(one: Round, key: str) -> list[float]:
        return [one[f"{name} {key}"] for name in rivals if f"{name} {key}" in one]

    yield Aim(
        f"cold, SSD → usable tensors, of {limit}", 0.95, True,
        found.ratio("readers", lambda r: size / r["nearline cold"] / r[limit]),
    )  # fmt: skip
    yield Aim(
        "the same until the last byte is in the pool", 0.95, True,
        found.ratio("readers", lambda r: size / r["nearline filled"] / r[limit]),
    )  # fmt: skip
    yield Aim(
        "cold, times the fastest rival's rate", 1.0, True,
        found.ratio("readers", lambda r: min(of_all(r, "cold")) / r["nearline cold"]),
    )  # fmt: skip
    yield Aim(
        "cold, times the rivals' median rate", 1.2, True,
        found.ratio("readers", lambda r: statistics.median(of_all(r, "cold")) / r["nearline cold"]),
    )  # fmt: skip
    yield Aim(
        "cold, CPU seconds, of the cheapest rival's", 0.5, False,
        found.ratio("readers", lambda r: r["nearline cold cpu"] / min(of_all(r, "cold cpu"))),
    )  # fmt: skip
    yield Aim(
        "verification, of a cold load", 0.10, False,
        found.ratio("readers", lambda r: r["nearline verified cold"] / r["nearline cold"] - 1),
    )  # fmt: skip


def _other_aims(found: Found) -> Iterable[Aim]:
    yield Aim(
        "tmpfs → pool, of memory copy bandwidth", 0.6, True, found.ratio("tmpfs", lambda r: r["filled"] / r["memcpy"])
    )
    big = [1e3 * s for s in found.values("dram", "big")]
    yield Aim("DRAM → tensors", 20.0, False, big, " ms")
    yield Aim("the same, one tenth of the size: the difference", 5.0, False,
              [1e3 * v for v in found.ratio("dram", lambda r: r["big"] - r["small"])], " ms")  # fmt: skip
    over = found.ratio("ttft", lambda r: 1e3 * (r["cold"] - 1.15 * max(r["read"], r["prefill"])))
    prompt = f"{found.prompt_tokens}-token prompt"
    yield Aim(f"cold first token, {prompt}, beyond 1.15 × max(read, prefill)", 30.0, False, over, " ms")
    for key in ("from disk", "from memory"):
        rates = [one[key] / one["write"] for one in found.rounds.get("import", []) if one.get("write") and key in one]
        limits = [found.num_bytes / one[f"{key} floor s"] / one["write"] for one in found.rounds.get("import", [])
                  if one.get("write") and one.get(f"{key} floor s")]  # fmt: skip
        yield Aim(f"import {key}, of the disk's write bandwidth", 0.5, True, rates, limits=limits)
    yield Aim("swap in DRAM to the first token of one token", 100.0, False,
              [1e3 * s for s in found.values("swap", "swap")], " ms",
              [1e3 * s for s in found.values("swap", "weights once through memory")])  # fmt: skip
    yield Aim("the same without that token's own forward pass", 100.0, False,
              [1e3 * v for v in found.ratio("swap", lambda r: r["swap"] - r["forward"])], " ms")  # fmt: skip


def body(found: Found) -> str:
    """Write the whole result: aims, readers, the rest, notes."""
    gigabytes = found.num_bytes / 1e9
    parts = [
        f"A Llama-shaped bfloat16 checkpoint of {gigabytes:.2f} GB, {found.num_rounds} rounds, interleaved. Ratios are "
        "of one round; medians (smallest–largest). Usable: every tensor is there, a byte of every page has been read.",
        record.table(["aim", "aimed", "measured", "met"], [aim.row() for aim in aims(found)]),
    ]
    if "readers" in found.rounds:
        parts.append(_readers_table(found))
    parts.append(_details(found))
    parts.append(_remarks(found))
    if found.notes:
        parts.append("Notes:\n\n" + "\n".join(f"- {note}" for note in found.notes))
    return "\n\n".join(parts)


def _readers_table(found: Found) -> str:
    def cell(key: str, scale: float = 1.0, digits: int = 2) -> str:
        values = found.values("readers", key)
        return f"{statistics.median(values) * scale:.{digits}f}" if values else "–"

    rows = []
    for name in ("nearline", *found.rivals):
        label = name if name == "nearline" else f"{name} {version(name)}"
        rate = found.num_bytes / found.median("readers", f"{name} cold") / 1e9
        cells = [cell(f"{name} {key}") for key in ("cold", "cold cpu", "sharded", "warm", "warm cpu")]
        rows.append([label, f"{rate:.2f}", *cells])
    rows.append(["nearline, digests checked", "–", cell("nearline verified cold"), cell("nearline verified cold cpu"),
                 "–", "–", "–"])  # fmt: skip
    limits = sorted({key for one in found.rounds["readers"] for key in one if key.startswith("fio")})
    rows += [[key, cell(key, 1e-9), *["–"] * 5] for key in limits]
    header = ["reader", "cold GB/s", "cold s", "cold CPU s", "cold, 4 shards s", "warm s", "warm CPU s"]
    note = "Warm: the page cache holds the file (the rivals); the pool holds it (nearline)."
    return record.table(header, rows) + "\n\n" + note


def _details(found: Found) -> str:
    rows = []
    for section, keys in found.rounds.items():
        if section == "readers":
            continue
        for key in dict.fromkeys(key for one in keys for key in one):
            values = [one[key] for one in keys if key in one]
            is_rate = key in ("memcpy", "filled", "usable", "write", "from disk", "from memory")
            scale, unit = (1e-9, "GB/s") if is_rate else (1e3, "ms")
            rows.append([section, key, f"{record.spread(values, scale)} {unit}"])
    return record.table(["section", "what", "median (min–max)"], rows)


def _remarks(found: Found) -> str:
    """Say what stands behind the numbers, met or missed."""
    lines = [
        "- Ours reads into a pool that was touched before anybody called, on huge pages; fio and the rivals into small "
        "pages, most rivals into fresh ones: first touch is slower than the disk on such a machine.",
    ]
    if found.rounds.get("swap"):
        lines.append(_swap_remark(found))
    if found.rounds.get("ttft"):
        beside, prefill = (found.median("ttft", key) * 1e3 for key in ("prefill beside", "prefill"))
        lines.append(
            f"- First token: a prefill takes {prefill:.0f} ms, and {beside:.0f} ms while another checkpoint is read; "
            "the first layer waits for the whole embedding."
        )
    if found.rounds.get("import"):
        lines.append(_import_remark(found))
    return "\n".join(lines)


def _swap_remark(found: Found) -> str:
    keys = ("swap", "forward", "weights once through memory", "unbind", "unbind and bind")
    swap, forward, floor, unbind, bind = (found.median("swap", key) * 1e3 for key in keys)
    first = statistics.median(found.ratio("swap", lambda r: 1e3 * (r["swap"] - r["unbind and bind"])))
    return (
        f"- Swap: the floor of the first token is {floor:.0f} ms, every weight read once at the "
        f"{found.num_bytes / floor / 1e6:.0f} GB/s that all cores reach on this memory in the same rounds; the forward "
        f"pass of the bound model takes {forward:.0f} ms. A swap's {swap:.0f} ms (medians, each by itself): unbinding "
        f"{unbind:.1f} ms, then binding until {bind:.1f} ms, then {first:.1f} ms for the first token, in which layers "
        "become views and cache pages are touched for the first time."
    )


def _import_remark(found: Found) -> str:
    cases = []
    for key, crossings in (("from disk", "read and written once"), ("from memory", "written once")):
        if found.values("import", f"{key} floor s"):
            elapsed_s, floor_s = found.median("import", f"{key} s"), found.median("import", f"{key} floor s")
            cases.append(f"{key}, every byte is {crossings}: {elapsed_s:.1f} s, the disk alone {floor_s:.1f} s")
    return (
        f"- Import: {'; '.join(cases)} (at the bandwidths of the same minute, reading and writing one after the other: "
        "they share the disk). What was written is checked by the first load, which reads it anyway."
    )


def plot(found: Found, path: Path) -> None:
    """Draw cold rates and CPU seconds of all readers."""
    if "readers" not in found.rounds:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = ["nearline", *sorted(found.rivals, key=lambda name: found.median("readers", f"{name} cold"))]
    rates = [found.num_bytes / found.median("readers", f"{name} cold") / 1e9 for name in names]
    cpu = [found.median("readers", f"{name} cold cpu") for name in names]
    colours = [_OURS if name == "nearline" else _RIVAL for name in names]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    left.barh(names, rates, color=colours)
    left.axvline(found.median("readers", found.limit) / 1e9, color=_LIMIT, label=f"{found.limit}")
    left.set_xlabel("cold, GB/s to usable tensors")
    left.legend(loc="lower right", fontsize="small")
    right.barh(names, cpu, color=colours)
    right.set_xlabel("CPU seconds of that load")
    left.invert_yaxis()
    figure.suptitle(f"Loading {found.num_bytes / 1e9:.2f} GB of bfloat16 from a cold disk")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)

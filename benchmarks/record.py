"""How a measurement is written down: with the command, the machine and the date, in benchmarks/results/."""

import datetime
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> str:
    """One line: processor, cores, memory."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = psutil.virtual_memory().total / 2**30
    return f"{psutil.cpu_count()} cores of {model}, {memory:.0f} GiB memory, {platform.system()} {platform.release()}"


def write(name: str, title: str, body: str, folder: Path = RESULTS) -> Path:
    """Write `<folder>/<name>.md`, replacing an older run. Returns its path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.md"
    today = datetime.datetime.now(datetime.UTC).date()
    command = " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    path.write_text(f"# {title}\n\n- command: `{command}`\n- machine: {machine()}\n- date: {today}\n\n{body}\n")
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def spread(values: Sequence[float], scale: float = 1e3) -> str:
    """Median with the smallest and largest, in milliseconds by default."""
    middle, low, high = statistics.median(values) * scale, min(values) * scale, max(values) * scale
    return f"{middle:.1f} ({low:.1f}–{high:.1f})"


def quartiles(values: Sequence[float], scale: float = 1e3) -> str:
    """Median with the quartiles and how many, in milliseconds by default."""
    low, middle, high = (value * scale for value in statistics.quantiles(values, n=4))
    return f"{middle:.1f} ({low:.1f}–{high:.1f}, of {len(values)})"

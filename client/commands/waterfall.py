"""Where the time to the first token went, drawn side by side."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

from nearline.client.commands.options import megabytes

PARTS = (
    ("queued", "queued_s"),
    ("process", "process_s"),
    ("bind", "bind_s"),
    ("read", "read_s"),
    ("prefill", "prefill_s"),
    ("first token", "first_token_s"),
)


def waterfall(runs: Mapping[str, Mapping[str, Any]]) -> Group:
    """One column per run: seconds of each part in milliseconds. Reading overlaps binding and prefill."""
    table = Table("", *[f"{name:>12}" for name in runs], box=None)
    for label, key in PARTS:
        table.add_row(label, *[milliseconds(timings.get(key)) for timings in runs.values()])
    table.add_row("bytes from", *[source(timings) for timings in runs.values()])
    return Group(table, "[dim]bind, read and prefill overlap: they add up to more than the time that passes[/]")


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:9.1f} ms"


def source(timings: Mapping[str, Any]) -> str:
    """Which tier the weights came from, and how fast."""
    if not timings.get("is_cold"):
        return "(running)"
    tier = str(timings.get("tier") or "?").upper()
    num_bytes, seconds = timings.get("read_bytes") or 0, timings.get("read_s") or 0.0
    if not num_bytes:
        return tier
    return f"{tier} {megabytes(num_bytes)} at {num_bytes / max(seconds, 1e-9) / 1e9:.1f} GB/s"

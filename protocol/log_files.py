"""One rule for the log of every process: it grows to a size; then what it held lies beside it, and it begins anew."""

from pathlib import Path

MAX_LOG_BYTES = 1024 * 1024


def older(path: Path) -> Path:
    """Where what a full log held is kept, until it is full again."""
    return path.with_name(path.name + ".old")

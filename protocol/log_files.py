"""One rule for the log of every process: it grows to a size; then what it held lies beside it, and it begins anew."""

from pathlib import Path

MAX_LOG_BYTES = 1024 * 1024
"""For an engine: there are many of them."""
MAX_SERVICE_LOG_BYTES = 16 * 1024 * 1024
"""For a process that serves: a line for every refused request must not push out in minutes why they were refused."""


def older(path: Path) -> Path:
    """Where what a full log held is kept, until it is full again."""
    return path.with_name(path.name + ".old")

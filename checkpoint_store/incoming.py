"""Where imports write before they commit: directories named after their process, and the sweep of dead ones."""

import os
import re
import secrets
import shutil
from pathlib import Path

INCOMING = "incoming"
_STAGING = re.compile(r".*-(\d+)-(\d+)-[0-9a-f]+$")


def sweep_incoming(root: Path) -> list[str]:
    """Remove what dead imports left in `incoming/`, and nothing of a living one. Returns the names removed."""
    incoming = root / INCOMING
    if not incoming.is_dir():
        return []
    dead = [entry for entry in sorted(incoming.iterdir()) if not _is_owner_alive(entry.name)]
    for entry in dead:
        shutil.rmtree(entry, ignore_errors=True)
    return [entry.name for entry in dead]


def staging_name(stem: str) -> str:
    """Name a new directory for this process: `<stem>-<pid>-<start of the process>-<random>`."""
    return f"{stem}-{os.getpid()}-{_start_ticks(os.getpid())}-{secrets.token_hex(4)}"


def _is_owner_alive(name: str) -> bool:
    match = _STAGING.match(name)
    return match is not None and _start_ticks(int(match[1])) == int(match[2]) != 0


def _start_ticks(pid: int) -> int:
    """When a process started, in kernel ticks since boot (0: no such process); tells it from a later one of its pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])

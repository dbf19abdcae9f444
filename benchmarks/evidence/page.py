"""How a piece of evidence is written down: the command, a table, and why ours differs. Same input, same page."""

from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def write(name: str, title: str, command: str, parts: Sequence[str]) -> Path:
    """Write `<name>.md` beside the scripts, replacing an older run. Returns its path."""
    path = FOLDER / f"{name}.md"
    path.write_text("\n\n".join([f"# {title}", f"Command: `{command}`", *parts]) + "\n")
    return path

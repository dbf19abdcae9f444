"""Run the demo and keep what a terminal shows of it as a picture.

Usage: python examples/record_demo.py     (writes docs/demo.svg; takes as long as the demo)
"""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 112


def main() -> None:
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "nearline", "demo"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print("[bold]$[/] make demo")
    for line in settled(done.stdout.decode()):
        console.print(Text.from_ansi(line))
    console.save_svg(str(ROOT / "docs" / "demo.svg"), title="make demo")


def settled(output: str) -> list[str]:
    """What stays on the screen: of a line drawn again and again, such as a progress bar, the last state."""
    lines: list[str] = []
    for line in output.split("\n"):
        num_rows_up = len(re.findall(r"\x1b\[1A", line))
        lines = lines[: len(lines) - num_rows_up] if num_rows_up else lines
        last = line.split("\r")[-1] if not line.endswith("\r") else line.split("\r")[-2]
        lines.append(re.sub(r"\x1b\[(?:\?25[lh]|\d*[AKJ])", "", last).rstrip())
    return lines


if __name__ == "__main__":
    main()

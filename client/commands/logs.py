"""`nearline logs`: what the processes of this machine's platform wrote."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, BinaryIO

from typer import Argument, Exit, Option

from nearline.client.commands.options import Json, console, fail, print_json
from nearline.client.config import default_data_dir
from nearline.protocol.errors import NotFound
from nearline.protocol.log_files import older

POLL_S = 0.2
TAIL_BYTES = 1 << 20
"""Lines are looked for in so much of a log's end."""

Which = Annotated[str | None, Argument(metavar="[PROCESS]", help="controller, node_agent, valkey or engine-N.")]
DataDir = Annotated[Path | None, Option(help="Where `nearline up` keeps everything.")]
Lines = Annotated[int, Option("--lines", "-n", min=0, help="How many of the last lines.")]
Follow = Annotated[bool, Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")]


def logs(
    process: Which = None, data_dir: DataDir = None, lines: Lines = 40, follow: Follow = False, as_json: Json = False
) -> None:
    """Show the last lines a process wrote; without a name, list which there are. Works while nothing runs, too."""
    root = (data_dir or default_data_dir()).expanduser()
    found = log_files(root)
    if process is None:
        if as_json:
            print_json(
                [{"id": name, "path": str(path), "num_bytes": path.stat().st_size} for name, path in found.items()]
            )
        else:
            console.print("\n".join(found) or f"no logs in {root}; `nearline up` writes some")
        return
    if process not in found:
        there = f"there are {', '.join(found)}" if found else "there are none; name another --data-dir?"
        fail(NotFound(f"no process {process!r} has a log in {root}; {there}", param="process"), as_json)
    if as_json:
        with found[process].open("rb") as file:
            print_json(last_lines(file, lines).splitlines())
        return
    try:
        show(found[process], lines, follow)
    except KeyboardInterrupt:
        raise Exit(130) from None


def log_files(data_dir: Path) -> dict[str, Path]:
    """Every process's log by its name, those of engines last, the newest engine first."""
    engines = sorted((data_dir / "node" / "logs").glob("engine-*.log"), key=lambda path: -path.stat().st_mtime)
    return {path.stem: path for path in [*sorted((data_dir / "logs").glob("*.log")), *engines]}


def last_lines(file: BinaryIO, num_lines: int) -> str:
    """Read a log to its end and return the last lines."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    lines = file.read().decode(errors="replace").splitlines(keepends=True)
    return "".join(lines[-num_lines:] if num_lines else [])


def show(path: Path, num_lines: int, follow: bool) -> None:
    """Write the last lines to stdout; when following, all that comes after them, for ever.

    A full log is followed into what takes its place, the same file, emptied, or another one; so is a process's next.
    """
    file = path.open("rb")
    try:
        _write(last_lines(file, num_lines))
        while follow:
            is_replaced = _is_replaced(path, file)
            if data := file.read():
                _write(data.decode(errors="replace"))
            elif is_replaced:
                file.close()
                file = path.open("rb")
            elif file.tell() > os.fstat(file.fileno()).st_size:
                _write(_missed(path, file.tell()))
                file.seek(0)
            else:
                time.sleep(POLL_S)
    finally:
        file.close()


def _missed(path: Path, position: int) -> str:
    """What a log held behind a position when it was emptied."""
    try:
        with older(path).open("rb") as file:
            file.seek(position)
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _is_replaced(path: Path, file: BinaryIO) -> bool:
    """Whether another file stands where this one was; for a moment none may."""
    try:
        return not os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

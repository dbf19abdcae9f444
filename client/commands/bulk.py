"""`nearline adapter add 'path/*' --base m`: every PEFT directory of a pattern, each under its directory's name."""

import glob
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nearline.client.blocking import Client
from nearline.client.commands.options import console, counted, notices, print_json
from nearline.protocol.errors import CheckpointCorrupt, InvalidRequest, NearlineError

_MARK = "adapter_config.json"
_COLUMNS = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))


@dataclass
class BulkResult:
    """What became of each directory."""

    registered: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)


def adapter_directories(pattern: str) -> list[Path]:
    """List the PEFT directories that match, by name. Raises InvalidRequest when none does, or two share a name."""
    matches = [Path(match).resolve() for match in glob.glob(str(Path(pattern).expanduser()), recursive=True)]
    found = sorted((path for path in matches if (path / _MARK).is_file()), key=lambda path: (path.name, path))
    if not found:
        raise InvalidRequest(
            f"nothing that matches {pattern!r} is a directory with {_MARK}; quote the pattern, or give name and source"
        )
    for one, other in itertools.pairwise(found):
        if one.name == other.name:
            raise InvalidRequest(f"{one} and {other} would both be called {one.name!r}; add one of them by itself")
    return found


def add_adapters(client: Client, pattern: str, base: str, replace: bool, as_json: bool) -> None:
    """Register them one after another and say what became of each. Leaves with status 1 if any failed."""
    directories, result = adapter_directories(pattern), BulkResult()
    with Progress(*_COLUMNS, console=notices, transient=True, disable=as_json or not notices.is_terminal) as progress:
        task = progress.add_task("", total=len(directories))
        for path in directories:
            progress.update(task, description=escape(path.name))
            _add_one(client, {"name": path.name, "base": base, "source": str(path), "replace": replace}, result)
            progress.advance(task)
    if as_json:
        print_json({"registered": result.registered, "failed": result.failed})
    else:
        for failure in result.failed:
            notices.print(f"[red]✗[/] {escape(failure['name'])}: {escape(failure['error']['message'])}")
        mark = "[red]✗[/]" if result.failed else "[green]✓[/]"
        num = len(result.registered)
        verb = "is" if len(directories) == 1 else "are"
        console.print(f"{mark} {num} of {counted(len(directories), 'adapter')} {verb} registered on {escape(base)}")
    if result.failed:
        raise typer.Exit(1)


def _add_one(client: Client, body: dict[str, Any], result: BulkResult) -> None:
    try:
        events = list(client.admin.add("adapters", body))
        if not events:
            raise CheckpointCorrupt("the platform ended the import without a result; see its logs")
    except NearlineError as error:
        reason = {"message": error.message, "code": error.code, "param": error.param}
        result.failed.append({"name": body["name"], "source": body["source"], "error": reason})
    else:
        result.registered.append(events[-1])

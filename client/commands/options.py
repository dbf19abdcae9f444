"""Options that every verb shares, and how a verb talks to the platform and reports failure."""

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.markup import escape

from nearline.client.blocking import Client
from nearline.client.config import API_KEY_VARIABLE, URL_VARIABLE
from nearline.protocol.errors import NearlineError

Rows = list[dict[str, Any]]

Url = Annotated[str | None, typer.Option("--url", envvar=URL_VARIABLE, help="Where the platform answers.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar=API_KEY_VARIABLE, help="Your tenant's key.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, nothing else.")]

WIDE = 400
"""Columns of a table that goes to a file or a pipe: programs read whole rows, ids are never cut."""

CURES = {
    "invalid_api_key": f"give your key with --api-key or {API_KEY_VARIABLE}",
    "name_taken": "here that is --replace",
    "no_chat_template": "at this command --raw continues the text itself",
    "permission_denied": f"give that with --api-key or {API_KEY_VARIABLE}",
}
"""What a person at this command can do about an error that the platform words for every kind of caller."""

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDE)
notices = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def fail(error: NearlineError, as_json: bool = False) -> NoReturn:
    """Say what went wrong and leave with status 1."""
    if as_json:
        print_json({"error": {"message": error.message, "code": error.code, "param": error.param}})
    else:
        cure = f"; {CURES[error.code]}" if error.code in CURES else ""
        notices.print(f"[bold red]error:[/] {escape(error.message)}{cure} [dim]({error.code})[/]")
    raise typer.Exit(1)


@contextmanager
def connected(url: str | None, api_key: str | None, as_json: bool = False) -> Iterator[Client]:
    """A client for one verb; errors end the command with a message, Ctrl-C with status 130."""
    client = None
    try:
        client = Client(url, api_key)
        yield client
    except NearlineError as error:
        fail(error, as_json)
    except KeyboardInterrupt:
        notices.print("interrupted")
        raise typer.Exit(130) from None
    finally:
        if client is not None:
            client.close()


def listed(
    read: Callable[[Client], Rows],
    table_of: Callable[[Rows], RenderableType],
    options: tuple[str | None, str | None, bool],
) -> None:
    """A verb that lists: a table for people, one JSON array for programs. `options` are url, API key and --json."""
    with connected(*options) as client:
        rows = read(client)
        if options[2]:
            print_json(rows)
        else:
            console.print(table_of(rows))


def given(**settings: Any) -> dict[str, Any]:
    """Keep the settings that were named."""
    return {name: value for name, value in settings.items() if value is not None}


def taking(options: Mapping[str, Any], parameter: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb a table of options where its `parameter` stands; it gets those that were named as that, a dict."""

    def wrap(verb: Callable[..., None]) -> Callable[..., None]:
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
                 for name, option in options.items()]  # fmt: skip
        named: list[inspect.Parameter] = []
        for own in inspect.signature(verb).parameters.values():
            named += added if own.name == parameter else [own.replace(kind=own.KEYWORD_ONLY)]

        @functools.wraps(verb)
        def run(**values: Any) -> None:
            verb(**{parameter: given(**{name: values.pop(name) for name in options})}, **values)

        run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in named}
        return run

    return wrap


def in_words(key: str, value: Any) -> str:
    """One field of an object for people: sizes and times by the ending of its name, nothing as a dash."""
    if value is None or value in ("", [], {}):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {in_words(name, each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(in_words(key, each) for each in value)
    if key.endswith("_at") and isinstance(value, (int, float)):
        return datetime.fromtimestamp(value).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if key.endswith("_bytes") and isinstance(value, (int, float)):
        return megabytes(value)
    seconds = " s" if key.endswith("_s") and not key.endswith("per_s") else ""
    return f"{value:.4g}{seconds}" if isinstance(value, float) else f"{value}{seconds}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def megabytes(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"

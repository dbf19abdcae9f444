"""`nearline model …` and `nearline adapter …`: what may be called."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from nearline.client.blocking import Client
from nearline.client.commands.bulk import add_adapters
from nearline.client.commands.options import (
    ApiKey,
    Json,
    Rows,
    Url,
    connected,
    console,
    given,
    listed,
    megabytes,
    notices,
    print_json,
)
from nearline.client.commands.settings import with_settings
from nearline.client.commands.tables import Listing, described
from nearline.protocol.errors import Forbidden, NearlineError, NodeLost

model = typer.Typer(no_args_is_help=True, help="Register, list and remove models.")
adapter = typer.Typer(no_args_is_help=True, help="Register, list and remove LoRA adapters.")

BAR = (TextColumn("{task.description:>10}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
Replace = Annotated[bool, typer.Option("--replace", help="Take a name that is in use; what it named goes.")]
Name = Annotated[str, typer.Argument(help="The name people will call; it may contain '/'.")]
Quantize = Annotated[
    Literal["int8", "int4"] | None,
    typer.Option(
        help="Store weights in 8 or 4 bits: fewer bytes to load and to read per token, a little precision lost."
    ),
]
Source = Annotated[str, typer.Argument(help="A directory, a .gguf file, an http(s) URL, or hub:org/name\\[@revision].")]


@model.command("add")
@with_settings
def add_model(
    name: Name,
    source: Source,
    settings: dict[str, Any],
    no_convert: Annotated[bool, typer.Option("--no-convert", help="Serve a local safetensors file as it is.")] = False,
    quantize: Quantize = None,
    replace: Replace = False,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Import a model into the store and make it callable."""
    where = f"as-is:{absolute(source)}" if no_convert else absolute(source)
    body = {"name": name, "source": where, "replace": replace, **settings, **given(quantize=quantize)}
    with connected(url, api_key, as_json) as client:
        registered = register(client, "models", body, is_quiet=as_json)
        if as_json:
            print_json(registered)
        else:
            if registered.get("quantization"):
                console.print(_quantised_as(registered))
            console.print(f"[green]✓[/] {name} is registered; try: {_first_call(registered)}")


def _quantised_as(registered: dict[str, Any]) -> str:
    """Say what quantising saved and lost."""
    size, lost = megabytes(registered["num_bytes"]), registered["quantization_error"]
    return (
        f"quantised to {registered['quantization']}: {size} in all, weights off by {lost:.2%} of their size "
        "(root mean square); what that costs in answers depends on the model"
    )


@adapter.command("add")
def add_adapter(
    name: Annotated[str, typer.Argument(help="The name people will call; alone: a quoted pattern of directories.")],
    base: Annotated[str, typer.Option(help="The registered model it was trained on.")],
    source: Annotated[
        str | None, typer.Argument(help="A PEFT directory, an http(s) URL, or hub:org/name\\[@revision].")
    ] = None,
    replace: Replace = False,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Import a LoRA adapter and make it callable by its own name.

    With a pattern instead of a name and a source ('adapters/*'), every PEFT directory that matches, each under the
    directory's name.
    """
    with connected(url, api_key, as_json) as client:
        if source is None:
            add_adapters(client, name, base, replace, as_json)
            return
        body = {"name": name, "base": base, "source": absolute(source), "replace": replace}
        registered = register(client, "adapters", body, is_quiet=as_json)
        if as_json:
            print_json(registered)
        else:
            console.print(f"[green]✓[/] {name} is registered on {base}; try: {_first_call(registered)}")


def _first_call(registered: dict[str, Any]) -> str:
    """A command that gets an answer: without a chat template a model only continues text."""
    raw = "" if registered.get("has_chat_template", True) else " --raw"
    return f"nearline invoke {registered['id']} 'Hello!'{raw}"


def register(client: Client, kind: str, body: dict[str, Any], is_quiet: bool = False) -> dict[str, Any]:
    """Register and show a progress bar. Returns the registered object as the platform describes it."""
    return followed(client.admin.add(kind, body), f"the import of {body['name']}", is_quiet)


def followed(events: Iterable[dict[str, Any]], what: str, is_quiet: bool) -> dict[str, Any]:
    """Show the phases of long work as bars. Returns its result; raises NodeLost if it ends without one."""
    result: dict[str, Any] | None = None
    with Progress(*BAR, console=notices, disable=is_quiet or not notices.is_terminal) as progress:
        tasks: dict[str, TaskID] = {}
        for event in events:
            if not show_phase(progress, tasks, event):
                result = event
    if result is None:
        raise NodeLost(f"{what} ended without a result; see the platform's logs")
    return result


def show_phase(progress: Progress, tasks: dict[str, TaskID], event: dict[str, Any]) -> bool:
    """Move the bar of an import's phase; phases that move no bytes get none. False when the event is the result."""
    phase = event.get("phase")
    if phase is None:
        return False
    total = event["total_bytes"]
    if total:
        if phase not in tasks:
            tasks[phase] = progress.add_task(phase, total=total)
        progress.update(tasks[phase], completed=event["done_bytes"], total=total)
    return True


def absolute(source: str) -> str:
    """A local path as the server sees it; hub: and URL sources stay as they are."""
    if "://" in source or source.startswith(("hub:", "file:/")):
        return source
    return str(Path(source).expanduser().resolve())


@model.command("list")
def list_models(url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show every registered model, where its bytes are and what runs; without the admin key, what may be called."""
    listed(_all_or_callable, _models_table, (url, api_key, as_json))


def _all_or_callable(client: Client) -> Rows:
    """What is registered; to a key that may not administer, what it may call."""
    try:
        return client.admin.list("models")
    except Forbidden:
        return client.models()


def _models_table(rows: Rows) -> RenderableType:
    if rows and "state" not in rows[0]:
        table = Listing("MODEL", "BASE", "CONTEXT")
        for row in rows:
            table.add(row["id"], row["parent"] or "–", str(row["max_model_len"]))
        return table
    table = Listing("MODEL", "STATE", "TIER", "SIZE", "DTYPE", "CONTEXT", "INSTANCES")
    for row in rows:
        size, context = megabytes(row["num_bytes"]), str(row["max_context_tokens"])
        kept_as = row.get("quantization") or row["dtype"]
        table.add(row["id"], row["state"], row["tier"], size, kept_as, context, str(row["num_instances"]))
    return table if rows else "no models; add one with: nearline model add NAME SOURCE"


@adapter.command("list")
def list_adapters(url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show every registered adapter and its base."""
    listed(lambda client: client.admin.list("adapters"), _adapters_table, (url, api_key, as_json))


def _adapters_table(rows: Rows) -> RenderableType:
    table = Listing("ADAPTER", "BASE", "RANK", "SIZE")
    for row in rows:
        table.add(row["id"], row["base"], str(row["rank"]), megabytes(row["num_bytes"]))
    return table if rows else "no adapters; add one with: nearline adapter add NAME SOURCE --base MODEL"


@model.command("show")
def show_model(name: Name, url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show one model in full."""
    with connected(url, api_key, as_json) as client:
        shown = client.admin.show("models", name)
        if as_json:
            print_json(shown)
            return
        for line in described(shown):
            console.print(line)


@model.command("rm")
def remove_model(name: Name, url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Remove a model: running requests finish, its bytes leave the store."""
    _remove("models", name, url, api_key, as_json)


@adapter.command("rm")
def remove_adapter(name: Name, url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Remove an adapter: running requests finish on it."""
    _remove("adapters", name, url, api_key, as_json)


def _remove(kind: str, name: str, url: str | None, api_key: str | None, as_json: bool) -> None:
    with connected(url, api_key, as_json) as client:
        try:
            client.admin.remove(kind, name)
        except NearlineError as error:
            error.add_note(f"while removing {name}")
            raise
        if as_json:
            print_json({"id": name, "deleted": True})
        else:
            console.print(f"[green]✓[/] {name} is removed")

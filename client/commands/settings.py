"""A model's settings as options (promises, keep-alive, replicas), and `nearline model set`, which changes them."""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from nearline.client.commands.options import ApiKey, Json, Url, connected, console, fail, print_json, taking
from nearline.protocol.errors import InvalidRequest

OPTIONS: dict[str, Any] = {
    "keep_alive_s": Annotated[
        float | None,
        typer.Option("--keep-alive", help="Seconds an idle instance stays up; -1: for ever (default 300)."),
    ],
    "keep_alive_min_s": Annotated[
        float | None,
        typer.Option(
            "--keep-alive-min", help="Learn the keep-alive from the model's own calls, from this up to --keep-alive."
        ),
    ],
    "min_replicas": Annotated[int | None, typer.Option(help="Instances kept even when idle.")],
    "max_replicas": Annotated[int | None, typer.Option(help="Instances at most.")],
    "slo": Annotated[
        str | None, typer.Option(help="Class of requests that name none: interactive, batch-1m or batch-1h.")
    ],
    "ttft_ms": Annotated[float | None, typer.Option(help="Milliseconds to the first token that they are promised.")],
    "tpot_ms": Annotated[float | None, typer.Option(help="Milliseconds per further token that they are promised.")],
    "deadline_ms": Annotated[float | None, typer.Option(help="Milliseconds to the last token that they are promised.")],
}
"""By the API's names. Every verb that sets them takes them from here."""


class Clearable(StrEnum):
    """What a model may be without, as its option is written."""

    SLO = "slo"
    TTFT_MS = "ttft-ms"
    TPOT_MS = "tpot-ms"
    DEADLINE_MS = "deadline-ms"
    KEEP_ALIVE_MIN = "keep-alive-min"

    @property
    def setting(self) -> str:
        """The API's name."""
        return "keep_alive_min_s" if self is Clearable.KEEP_ALIVE_MIN else self.value.replace("-", "_")


def with_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb OPTIONS after its arguments; it gets those that were named as its parameter `settings`."""
    return taking(OPTIONS, "settings")(verb)


@with_settings
def set_model(
    name: Annotated[str, typer.Argument(help="The registered model.")],
    settings: dict[str, Any],
    clear: Annotated[
        list[Clearable] | None, typer.Option(help="Take a promise or the learned keep-alive away; repeatable.")
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Change settings of a registered model; what runs goes on."""
    changes = settings | {one.setting: None for one in clear or ()}
    if not changes:
        fail(InvalidRequest("nothing to change; see `nearline model set --help`"), as_json)
    with connected(url, api_key, as_json) as client:
        changed = client.admin.change(name, changes)
        if as_json:
            print_json(changed)
        else:
            said = [f"{key} = {'none' if value is None else value}" for key, value in changes.items()]
            console.print(f"[green]✓[/] {name}: {', '.join(said)}")

"""`nearline model set`: what a registered model's requests are promised, and how long and how often it runs."""

from typing import Annotated, Any

import typer

from nearline.client.commands.options import ApiKey, Json, Url, connected, console, fail, print_json
from nearline.protocol.errors import InvalidRequest

KeepAlive = Annotated[
    float | None, typer.Option(help="Seconds an idle instance stays up; negative: for ever (default 300).")
]
KeepAliveMin = Annotated[
    float | None, typer.Option(help="Learn the keep-alive from the model's own calls, from this up to --keep-alive.")
]
MinReplicas = Annotated[int | None, typer.Option(help="Instances kept even when idle.")]
MaxReplicas = Annotated[int | None, typer.Option(help="Instances at most.")]
SloClass = Annotated[
    str | None, typer.Option("--slo", help="Class of requests that name none: interactive, batch-1m or batch-1h.")
]
TtftMs = Annotated[float | None, typer.Option(help="Milliseconds to the first token that they are promised.")]
TpotMs = Annotated[float | None, typer.Option(help="Milliseconds per further token that they are promised.")]


def given(**settings: Any) -> dict[str, Any]:
    """Keep the settings that were named."""
    return {name: value for name, value in settings.items() if value is not None}


def set_model(
    name: Annotated[str, typer.Argument(help="The registered model.")],
    keep_alive: KeepAlive = None,
    keep_alive_min: KeepAliveMin = None,
    min_replicas: MinReplicas = None,
    max_replicas: MaxReplicas = None,
    slo: SloClass = None,
    ttft_ms: TtftMs = None,
    tpot_ms: TpotMs = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Change settings of a registered model; what runs goes on."""
    settings = given(
        keep_alive_s=keep_alive, keep_alive_min_s=keep_alive_min, min_replicas=min_replicas, max_replicas=max_replicas,
        slo=slo, ttft_ms=ttft_ms, tpot_ms=tpot_ms,
    )  # fmt: skip
    if not settings:
        fail(InvalidRequest("nothing to change; see `nearline model set --help`"), as_json)
    with connected(url, api_key, as_json) as client:
        changed = client.admin.change(name, settings)
        if as_json:
            print_json(changed)
        else:
            console.print(f"[green]✓[/] {name}: {', '.join(f'{key} = {value}' for key, value in settings.items())}")

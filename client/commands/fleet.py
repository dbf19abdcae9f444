"""`nearline ps`, `nodes`, `queues` and `top`: what runs, where, and who waits for what."""

import time
from contextlib import suppress
from typing import Annotated, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from typer import Option

from nearline.client.commands.options import (
    ApiKey,
    Json,
    Rows,
    Url,
    connected,
    console,
    counted,
    listed,
    megabytes,
    print_json,
)
from nearline.client.commands.tables import Listing
from nearline.protocol.errors import StateUnavailable


def instances_table(rows: Rows) -> RenderableType:
    table = Listing("INSTANCE", "MODEL", "STATE", "NODE", "RUNNING", "WAITING", "KV", "ADAPTERS", "STOPS IN")
    for row in rows:
        expires = row.get("expires_in_s")
        table.add(
            row["id"], row["model"], row["state"], row["node"], str(row["num_running"]), str(row["num_waiting"]),
            f"{row['kv_tokens_used']}/{row['kv_tokens_total']}", str(row["num_adapters"]),
            "–" if expires is None else f"{expires:.0f} s",
        )  # fmt: skip
    return table if rows else "nothing runs; a call starts what it needs"


def nodes_table(rows: Rows) -> RenderableType:
    table = Listing("NODE", "DEVICES", "SLOTS", "PRE-WARMED", "DRAM FREE", "SSD FREE", "SSD", "DRAM")
    for row in rows:
        free = f"{megabytes(row['dram_free_bytes'])} of {megabytes(row['dram_pool_bytes'])}"
        rates = {tier: f"{megabytes(rate)}/s" for tier, rate in row["bandwidths"].items()}
        table.add(
            row["id"], ", ".join(row["devices"]), f"{row['num_instances']}/{row['num_slots']}",
            str(row["num_prewarmed"]), free,
            megabytes(row["ssd_free_bytes"]), rates.get("ssd", "–"), rates.get("dram", "–"),
        )  # fmt: skip
    return table if rows else "no nodes; start one with: nearline node --controller URL"


def queues_table(rows: Rows) -> RenderableType:
    table = Listing("MODEL", "CLASS", "WAITING", "TENANTS", "OLDEST", "DUE IN", "BECAUSE")
    for row in rows:
        table.add(
            row["model"], row["slo_class"], str(row["num_waiting"]), str(row["num_tenants"]),
            f"{row['oldest_s']:.1f} s", f"{row['due_in_s']:.1f} s", row["reason"],
        )  # fmt: skip
    return table if rows else "nobody waits"


def ps(url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show running instances, and why replicas that should be there are not."""
    with connected(url, api_key, as_json) as client:
        fleet = client.admin.fleet()
        if as_json:
            print_json(fleet["instances"])
            return
        console.print(instances_table(fleet["instances"]))
        for line in missing_lines(fleet["models"]):
            console.print(line)


def missing_lines(models: Rows) -> list[str]:
    """Say of each model with too few replicas what the next one waits for."""
    return [
        f"{model['num_missing']} of {escape(model['id'])}'s replicas {'is' if model['num_missing'] == 1 else 'are'}"
        f" missing: {escape(model['missing_because'] or 'it is being placed')}"
        for model in models
        if model.get("num_missing")
    ]


def nodes(url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show the machines of the fleet."""
    listed(lambda client: client.admin.list("nodes"), nodes_table, (url, api_key, as_json))


def queues(url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show who waits, the most urgent of each model first, and why."""
    listed(lambda client: client.admin.list("queues"), queues_table, (url, api_key, as_json))


Interval = Annotated[float, Option("--interval", "-n", min=0.1, metavar="SECONDS", help="Time between looks.")]


def top(url: Url = None, api_key: ApiKey = None, interval_s: Interval = 1.0, as_json: Json = False) -> None:
    """Watch the fleet until Ctrl-C; with --json, or into a pipe, look once."""
    with connected(url, api_key, as_json) as client:
        fleet = client.admin.fleet()
        if as_json:
            print_json(fleet)
        elif not console.is_terminal:
            console.print(screen(fleet))
        else:
            with (
                Live(screen(fleet), console=console, screen=True, auto_refresh=False) as live,
                suppress(KeyboardInterrupt),
            ):
                while True:
                    time.sleep(interval_s)
                    try:
                        live.update(screen(client.admin.fleet()), refresh=True)
                    except StateUnavailable as error:  # it may be starting again
                        live.update(escape(error.message), refresh=True)


def screen(fleet: dict[str, Any]) -> Group:
    """One look at everything."""
    num_up = sum(model["num_instances"] > 0 for model in fleet["models"])
    models = counted(len(fleet["models"]), "model")
    return Group(
        f"[bold]nearline[/] {fleet['version']}   {models}, {num_up} of them up",
        "\n[bold]instances[/]",
        instances_table(fleet["instances"]),
        *missing_lines(fleet["models"]),
        "\n[bold]queues[/]",
        queues_table(fleet["queues"]),
        "\n[bold]nodes[/]",
        nodes_table(fleet["nodes"]),
    )

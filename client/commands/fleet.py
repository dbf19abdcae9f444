"""`nearline ps`, `nearline nodes` and `nearline queues`: what runs, where, and who waits for what."""

from rich.table import Table

from nearline.client.commands.options import ApiKey, Json, Url, connected, console, megabytes, print_json


def ps(url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show running instances."""
    with connected(url, api_key, as_json) as client:
        rows = client.admin.list("instances")
        if as_json:
            print_json(rows)
            return
        table = Table(
            "INSTANCE", "MODEL", "STATE", "NODE", "RUNNING", "WAITING", "KV", "ADAPTERS", "IDLE UNTIL", box=None
        )
        for row in rows:
            expires = row.get("expires_in_s")
            table.add_row(
                row["id"], row["model"], row["state"], row["node"], str(row["num_running"]), str(row["num_waiting"]),
                f"{row['kv_tokens_used']}/{row['kv_tokens_total']}", str(row["num_adapters"]),
                "–" if expires is None else f"{expires:.0f} s",
            )  # fmt: skip
        console.print(table if rows else "nothing runs; a call starts what it needs")


def nodes(url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show the machines of the fleet."""
    with connected(url, api_key, as_json) as client:
        rows = client.admin.list("nodes")
        if as_json:
            print_json(rows)
            return
        table = Table("NODE", "DEVICES", "SLOTS", "PRE-WARMED", "DRAM FREE", "SSD FREE", "SSD", "DRAM", box=None)
        for row in rows:
            free = f"{megabytes(row['dram_free_bytes'])} of {megabytes(row['dram_pool_bytes'])}"
            rates = {tier: f"{megabytes(rate)}/s" for tier, rate in row["bandwidths"].items()}
            table.add_row(
                row["id"], ", ".join(row["devices"]), f"{row['num_instances']}/{row['num_slots']}",
                str(row["num_prewarmed"]), free,
                megabytes(row["ssd_free_bytes"]), rates.get("ssd", "–"), rates.get("dram", "–"),
            )  # fmt: skip
        console.print(table if rows else "no nodes; start one with: nearline node --controller URL")


def queues(url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show who waits, the most urgent of each model first, and why."""
    with connected(url, api_key, as_json) as client:
        rows = client.admin.list("queues")
        if as_json:
            print_json(rows)
            return
        table = Table("MODEL", "CLASS", "WAITING", "TENANTS", "OLDEST", "DUE IN", "BECAUSE", box=None)
        for row in rows:
            table.add_row(
                row["model"], row["slo_class"], str(row["num_waiting"]), str(row["num_tenants"]),
                f"{row['oldest_s']:.1f} s", f"{row['due_in_s']:.1f} s", row["reason"],
            )  # fmt: skip
        console.print(table if rows else "nobody waits")

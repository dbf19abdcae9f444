"""`nearline model verify|copy|evict`, `nearline adapter verify|copy`: looking after bytes."""

from typing import Annotated

from typer import Option

from nearline.client.commands.models import Name, followed
from nearline.client.commands.options import ApiKey, Json, Url, connected, console, megabytes, print_json


def verify_model(name: Name, url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Read a model's bytes on every node that has them and check each digest."""
    _verify("models", name, url, api_key, as_json)


def verify_adapter(name: Name, url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Read an adapter's bytes on every node that has them and check each digest."""
    _verify("adapters", name, url, api_key, as_json)


def evict_model(name: Name, url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Give a model's DRAM back: its next start reads from SSD."""
    with connected(url, api_key, as_json) as client:
        freed_bytes = client.admin.evict(name)
        if as_json:
            print_json({"id": name, "freed_bytes": freed_bytes})
        elif freed_bytes:
            console.print(f"[green]✓[/] {name}: {megabytes(freed_bytes)} of DRAM are free")
        else:
            console.print(f"{name} held no DRAM that could be freed (a running instance keeps its own)")


Node = Annotated[str | None, Option("--node", help="where to; default: the node with most disk left")]


def copy_model(name: Name, node: Node = None, url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Copy a model's bytes to another node, so that it can start there too."""
    _copy("models", name, node, (url, api_key, as_json))


def copy_adapter(name: Name, node: Node = None, url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Copy an adapter's bytes to another node, so that it can be used there too."""
    _copy("adapters", name, node, (url, api_key, as_json))


def _copy(kind: str, name: str, node: str | None, options: tuple[str | None, str | None, bool]) -> None:
    with connected(*options) as client:
        result = followed(client.admin.copy(kind, name, node), f"the copy of {name}", options[2])
        if options[2]:
            print_json(result)
        else:
            console.print(f"[green]✓[/] {name} is on {result['node']} too: {megabytes(result['num_bytes'])}")


def _verify(kind: str, name: str, url: str | None, api_key: str | None, as_json: bool) -> None:
    with connected(url, api_key, as_json) as client:
        result = followed(client.admin.verify(kind, name), f"the verification of {name}", as_json)
        if as_json:
            print_json(result)
            return
        rate = megabytes(result["bytes_per_s"])
        size = megabytes(result["num_bytes"])
        where = f" on {len(result['nodes'])} nodes" if len(result["nodes"]) > 1 else ""
        console.print(f"[green]✓[/] {name} is whole{where}: {size} checked in {result['seconds']:.2f} s ({rate}/s)")

"""`nearline profile`: what the steps of a model take on a machine of the fleet."""

from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from nearline.client.commands.models import Name
from nearline.client.commands.options import ApiKey, Json, Url, connected, console, notices, print_json
from nearline.protocol import StepProfile, from_plain
from nearline.protocol.errors import NodeLost

BAR = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn())


def profile(name: Name, url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Measure what a model's steps take where it runs, between its requests; the node keeps the result.

    The engine then cuts prompts by it, the controller tells waits by it, and `nearline simulate` can read it.
    """
    result: dict[str, Any] | None = None
    bar = Progress(*BAR, console=notices, disable=as_json or not notices.is_terminal)
    if not as_json:
        notices.print(f"measuring the steps of {escape(name)}, about half a minute")
    with connected(url, api_key, as_json) as client, bar as progress:
        tasks: dict[str, TaskID] = {}
        for event in client.admin.profile(name):
            if "phase" in event:
                _show(progress, tasks, event)
            else:
                result = event
        if result is None:
            raise NodeLost(f"the profile of {name} ended without a result; see the platform's logs")
    if as_json:
        print_json(result)
        return
    kept = from_plain(StepProfile, {key: value for key, value in result.items() if key not in ("id", "node")})
    console.print(f"[green]✓[/] {name} on {result['node']} ({kept.device}, {kept.num_threads} threads)")
    for line in describe(kept):
        console.print(f"  {line}")


def describe(profile: StepProfile) -> list[str]:
    """Say in words what a profile says in numbers."""
    model = profile.model
    prefill = f"{1e3 * model.prefill_base_s:.3g} ms + {1e6 * model.prefill_per_token_s:.3g} µs per token"
    prefill += f" + {1e9 * model.prefill_per_square_s:.2g} ns per token squared"
    decode = f"{1e3 * model.decode_base_s:.3g} ms + {1e3 * model.decode_per_sequence_s:.3g} ms per sequence"
    decode += f" + {1e6 * model.decode_per_context_s:.2g} µs per token of context"
    return [
        f"prefill  {prefill}   (error {profile.prefill_error:.1%})",
        f"decode   {decode}   (error {profile.decode_error:.1%})",
        f"so a prompt of 1,000 tokens takes {model.prefill_s(1000):.2f} s, one stream {1 / model.decode_s(1, 500):.0f}"
        f" tokens/s, eight {8 / model.decode_s(8, 4000):.0f} tokens/s",
    ]


def _show(progress: Progress, tasks: dict[str, TaskID], event: dict[str, Any]) -> None:
    phase, total = event["phase"], event["total_steps"] or None
    if phase not in tasks:
        tasks[phase] = progress.add_task(phase, total=total)
    progress.update(tasks[phase], completed=event["done_steps"], total=total)

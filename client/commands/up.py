"""`nearline up`, `controller` and `node`: starting the platform, whole or in parts."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from nearline.client.commands.options import fail, notices, taking
from nearline.client.config import DEFAULT_PORT, default_data_dir
from nearline.client.functions import AsyncClient
from nearline.client.platform import Platform, PlatformConfig, running_platform
from nearline.protocol.errors import Fault, InvalidRequest, NearlineError
from nearline.protocol.options import API_KEY, CALLER_OPTIONS, is_loopback

READY_TIMEOUT_S = 120.0
MAX_REFUSALS = 2
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

CALLERS: dict[str, Any] = {
    option.name: Annotated[
        list[str] | None if option.is_repeatable else str | None, Option(metavar=option.metavar, help=option.help)
    ]
    for option in CALLER_OPTIONS
}
"""They go to the controller, which says what is wrong with them."""

EnginePolicy = Annotated[
    str | None, typer.Option(help="In which order an engine's requests run: fcfs (default), shortest or mlfq.")
]
Merge = Annotated[
    str | None,
    typer.Option(help="Run adapters merged into a copy of the base: never (default), auto or always, in turns."),
]
TpotMs = Annotated[
    float | None,
    typer.Option(min=1, help="Target between tokens; prompts are cut so that steps keep it (default 100)."),
]
SwapBytes = Annotated[
    str | None, typer.Option(help="Host memory per engine for the KV of preempted requests, such as 2GiB.")
]


@taking(CALLERS, "callers")
def up(
    data_dir: Annotated[
        Path | None, typer.Option(help="Where everything is kept (default: NEARLINE_DATA, or ~/.local/share/nearline).")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = DEFAULT_PORT,
    redis: Annotated[
        str | None, typer.Option(help="A Redis or Valkey URL; without one an embedded Valkey runs.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Models that may run at once on each device (default: by cores).")
    ] = None,
    prewarm: Annotated[
        int | None, typer.Option(min=0, help="Engine processes kept ready per device (default: its slots, at most 2).")
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option("--pool-bytes", "--pool", help="DRAM for checkpoints, such as 8GiB (default: by memory)."),
    ] = None,
    ssd_budget: Annotated[str | None, typer.Option(help="Disk for checkpoints, such as 500GiB.")] = None,
    engine_policy: EnginePolicy = None,
    merge: Merge = None,
    tpot_ms: TpotMs = None,
    swap_bytes: SwapBytes = None,
    *,
    callers: dict[str, Any],
) -> None:
    """Run the platform on this machine until Ctrl-C: state store, controller and node agent."""
    agent_args: list[str] = []
    sizes = (("--pool-bytes", pool), ("--ssd-budget", ssd_budget), ("--swap-bytes", swap_bytes))
    habits = (("--engine-policy", engine_policy), ("--tpot-ms", tpot_ms), ("--merge", merge))
    for flag, value in (("--slots", slots), ("--prewarm", prewarm), *sizes, *habits):
        agent_args += [flag, str(value)] if value is not None else []
    config = PlatformConfig(
        data_dir=(data_dir or default_data_dir()).expanduser().resolve(),
        host=host,
        port=port,
        redis_url=redis,
        api_keys=tuple(callers.pop(API_KEY.name, ())),
        agent_args=tuple(agent_args),
        controller_args=_caller_args(callers),
    )
    try:
        _check(config)
        asyncio.run(_up(config))
    except NearlineError as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _caller_args(callers: dict[str, Any]) -> tuple[str, ...]:
    """Write CALLERS as the controller reads them; files by paths that hold wherever it starts."""
    arguments: list[str] = []
    for option in CALLER_OPTIONS:
        values = callers.get(option.name, ())
        for value in [values] if isinstance(values, str) else values:
            is_file = option.name.endswith("_file")
            arguments += [option.flag, str(Path(value).expanduser().absolute()) if is_file else value]
    return tuple(arguments)


def _check(config: PlatformConfig) -> None:
    """Ask the parts whether they can run with these options, before anything starts. Raises InvalidRequest."""
    where = ("--data-dir", str(config.data_dir / "unused"))
    keys = ("--api-key-file", "/dev/stdin") if config.api_keys else ()  # every user may read a command line
    door = (*keys, *config.controller_args)
    parts = (
        ("nearline.node_agent", ("--controller", "http://127.0.0.1", *config.agent_args), config.agent_args),
        ("nearline.controller", ("--redis", "unix:///unused", *door), door),
    )
    for module, arguments, chosen in parts:
        if not chosen:
            continue
        command = [sys.executable, "-m", module, *where, *arguments, "--check"]
        said = "\n".join(config.api_keys)
        done = subprocess.run(command, check=False, capture_output=True, text=True, input=said)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"{module} ended with status {done.returncode}"])[-1]
            last = re.sub(r"^nearline \w+: (error: )?", "", last)
            raise InvalidRequest(last.replace("--api-key-file /dev/stdin", "--api-key"))


async def _up(config: PlatformConfig) -> None:
    stopped = stop_signal()
    async with running_platform(config, say) as platform:
        await when_ready(platform, stopped)
        if not stopped.is_set():
            for line in open_to_others(config, platform.url):
                say(line)
            say(f"ready      {platform.url}   (data in {config.data_dir}; Ctrl-C stops everything)")
        await stopped.wait()
        say("stopping")


def open_to_others(config: PlatformConfig, url: str) -> list[str]:
    """What to say of a platform that other machines reach: by which address, and whether anybody on them may call."""
    if is_loopback(config.host):
        return []
    lines = []
    if config.host in ("0.0.0.0", "::"):
        lines.append(f"elsewhere  http://{own_address()}:{url.rsplit(':', 1)[1]}   (the URL for other machines)")
    if not config.api_keys and "--api-key-file" not in config.controller_args:
        may = "call" if "--admin-key-file" in config.controller_args else "call and administer"
        lines.append(f"[yellow]anyone who reaches this port may {may}; add --api-key-file[/]")
    return lines


def own_address() -> str:
    """The address of this machine that others see, or its name where no network is. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an address of nobody, so the default route answers
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def stop_signal() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


async def when_ready(platform: Platform, stopped: asyncio.Event | None = None) -> None:
    """Return once requests can be served (or `stopped` is set). Raises Fault after READY_TIMEOUT_S."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + READY_TIMEOUT_S
    async with AsyncClient(platform.url) as client:
        while not (stopped and stopped.is_set()):
            try:
                if await client.admin.is_ready():
                    return
            except NearlineError as error:
                if loop.time() > deadline:
                    raise Fault(f"not ready after {READY_TIMEOUT_S:.0f} s ({error}); see {platform.logs}") from None
            for child in platform.children:
                if child.num_refusals >= MAX_REFUSALS:
                    raise Fault(f"{child.name} does not start:\n{child.log_tail()}")
            await asyncio.sleep(0.05)


def say(line: str) -> None:
    notices.print(f"[dim]·[/] {line}")


def controller(context: typer.Context) -> None:
    """Run a controller alone; its own --help lists its options."""
    _become("nearline.controller", context.args)


def node(context: typer.Context) -> None:
    """Run a node agent alone; its own --help lists its options."""
    _become("nearline.node_agent", context.args)


def replay(context: typer.Context) -> None:
    """Replay a controller's journal and explain what it decided."""
    _become("nearline.controller.replay", context.args)


def simulate(context: typer.Context) -> None:
    """Run the controller's own policies on a trace in virtual time."""
    _become("nearline.simulator", context.args)


def _become(module: str, arguments: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def pass_through(app: typer.Typer, verbs: dict[str, Callable[..., Any]]) -> None:
    """Add verbs that hand all their arguments to another process."""
    for name, verb in verbs.items():
        app.command(name, context_settings=PASS_THROUGH)(verb)

"""`python -m nearline.node_agent`: the command line of the node agent."""

import argparse
import logging
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import structlog
import uvloop

from nearline.node_agent.agent import run_agent
from nearline.node_agent.config import NodeConfig, check, parse_bytes
from nearline.node_agent.devices import probe_hardware
from nearline.protocol import Bytes
from nearline.protocol.errors import NearlineError
from nearline.protocol.options import url_complaint, within
from nearline.protocol.secret_files import cluster_token
from nearline.protocol.stderr import Stderr

POLICIES = ("fcfs", "shortest", "mlfq")
"""What `python -m nearline.engine --policy` takes."""
MERGES = ("never", "auto", "always")
"""What its `--merge` takes. Under `auto` who else is there may change tokens at near ties."""


def main(arguments: list[str] | None = None) -> int:
    """Run the agent; returns the exit status. A failed start says why in one line."""
    options = _parser().parse_args(arguments)
    _configure_logging(options.json_logs)
    try:
        config = _config(options)
        if options.check:
            check(config, probe_hardware())
            return 0
        uvloop.run(run_agent(config))
    except (NearlineError, OSError, ValueError) as error:
        sys.stderr.write(f"nearline node: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nearline node", description="Serve models on this machine.")
    add = parser.add_argument
    add("--controller", required=True, type=_url, metavar="URL", help="the controller, e.g. http://10.0.0.1:8000")
    add("--data-dir", required=True, type=Path, help="checkpoints, logs and the node's name; one agent per directory")
    add("--node-id", help="lasting name of this node (default: kept in the data directory, made up at first)")
    add("--host", default="127.0.0.1", help="address of the node's own HTTP (0.0.0.0 for other machines)")
    add("--port", type=within(int, 0, 65_535), default=0, help="port of the node's own HTTP (0: any free one)")
    add("--pool-bytes", type=_size, metavar="SIZE", help="DRAM pool for checkpoints, e.g. 8GiB (default: 1/4 of RAM)")
    add("--ssd-budget", type=_size, metavar="SIZE", help="disk for checkpoints, e.g. 500GiB (default: what is free)")
    add(
        "--slots",
        type=within(int, 1, 1000),
        metavar="N",
        help="instances per device (default: one per core, at most 8; one per GPU)",
    )
    add(
        "--prewarm",
        type=within(int, 0, 1000),
        metavar="N",
        help="idle engine processes kept per device (default: slots, at most 2)",
    )
    add("--kv-bytes", type=_size, metavar="SIZE", help="KV caches of all instances of a device (default: 1/8 of RAM)")
    add(
        "--max-running",
        type=within(int, 1, 10_000),
        default=32,
        metavar="N",
        help="sequences decoded at once per instance",
    )
    add(
        "--hang-timeout",
        type=within(float, 0.1, 86_400),
        default=30.0,
        metavar="S",
        help="kill engines silent for this and long steps",
    )
    add("--engine-policy", choices=POLICIES, help="in which order an engine's sequences run (default: fcfs)")
    add(
        "--tpot-ms",
        type=within(float, 0.1, 1e6),
        metavar="MS",
        help="target between tokens for which prompts are cut (default: 100)",
    )
    add("--merge", choices=MERGES, help="run adapters on weights they are merged into (default: never)")
    add(
        "--swap-bytes",
        type=_size,
        metavar="SIZE",
        help="host memory per engine for preempted sequences' KV (default 0)",
    )
    add("--token-file", type=Path, help="file with the cluster token (or set NEARLINE_CLUSTER_TOKEN)")
    add("--engine-command", help="how to start engines, e.g. 'numactl -N0 python -m nearline.engine'")
    add("--json-logs", action="store_true", help="one JSON object per log line")
    add("--check", action="store_true", help="only say whether this machine can run so")
    return parser


def _config(options: argparse.Namespace) -> NodeConfig:
    config = NodeConfig(
        controller_url=options.controller,
        data_dir=options.data_dir.expanduser().absolute(),
        node_id=options.node_id,
        host=options.host,
        port=options.port,
        pool_bytes=options.pool_bytes,
        ssd_bytes=options.ssd_budget,
        num_slots=options.slots,
        num_prewarmed=options.prewarm,
        kv_bytes=options.kv_bytes,
        max_running=options.max_running,
        hang_timeout_s=options.hang_timeout,
        token=cluster_token(options.token_file, "--token-file"),
    )
    wished = (
        ("--policy", options.engine_policy),
        ("--tpot-ms", options.tpot_ms),
        ("--swap-bytes", options.swap_bytes),
        ("--merge", options.merge),
    )
    engine_options = [text for flag, value in wished if value is not None for text in (flag, str(value))]
    config = replace(config, engine_options=tuple(engine_options))
    if options.engine_command:
        config = replace(config, engine_command=tuple(shlex.split(options.engine_command)))
    return config


def _url(text: str) -> str:
    if (wrong := url_complaint(text)) is not None:
        raise argparse.ArgumentTypeError(wrong)
    return text


def _size(text: str) -> Bytes:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _configure_logging(is_json: bool) -> None:
    renderer = structlog.processors.JSONRenderer() if is_json else structlog.dev.ConsoleRenderer(colors=False)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,  # plain: tracebacks with locals would show secrets
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(Stderr()),
    )


if __name__ == "__main__":
    sys.exit(main())

"""`python -m nearline.controller`: the command line of the controller."""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import structlog
import uvloop

from nearline.controller.durable.limits import Limits
from nearline.controller.durable.redis_state import DEFAULT_PREFIX
from nearline.controller.http.browsers import host_name
from nearline.controller.service import ServiceConfig, serve
from nearline.controller.tenants import Tenants, read_admin_key, read_key_file
from nearline.protocol import TenantId
from nearline.protocol.errors import NearlineError
from nearline.protocol.options import CALLER_OPTIONS, within
from nearline.protocol.secret_files import cluster_token
from nearline.protocol.stderr import Stderr


def main(arguments: list[str] | None = None) -> int:
    """Run the controller; returns the exit status. A failed start says why in one line."""
    options = _parser().parse_args(arguments)
    _configure_logging(options.json_logs)
    try:
        config = _config(options)
        if not options.check:
            uvloop.run(serve(config))
    except (NearlineError, OSError, ValueError) as error:
        sys.stderr.write(f"nearline controller: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nearline controller", description="The front door of a fleet.")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (0.0.0.0 for other machines)")
    add("--port", type=within(int, 0, 65_535), default=8000, help="port to listen on (0: any free one)")
    add("--redis", required=True, metavar="URL", help="redis://host:port/db or unix:///path/to/socket")
    add("--key-prefix", default=DEFAULT_PREFIX, help="begin of every Redis key, one per deployment")
    add("--data-dir", required=True, type=Path, help="journal and cached tokenizers")
    add("--node-token-file", type=Path, help="file with the cluster token (or set NEARLINE_CLUSTER_TOKEN)")
    for option in CALLER_OPTIONS:
        repeated: dict[str, Any] = {"action": "append", "default": []} if option.is_repeatable else {}
        add(option.flag, metavar=option.metavar, help=option.help, **repeated)
    solver = "time for a better plan when models compete for slots; needs scipy beyond 7 models; 0: search alone"
    add("--solver-limit", type=within(float, 0, 3600), default=1.0, metavar="SECONDS", help=solver)
    add("--url-file", type=Path, help="write the address that was bound to this file")
    add("--max-running-jobs", type=within(int, 1, 10_000), default=32, help="jobs run at once")
    add(
        "--result-ttl",
        type=within(float, 1, 1e9),
        default=86_400.0,
        metavar="SECONDS",
        help="how long results are kept",
    )
    add("--json-logs", action="store_true", help="one JSON object per log line")
    add("--check", action="store_true", help="only say whether these options will do")
    return parser


def _config(options: argparse.Namespace) -> ServiceConfig:
    keys = [*options.api_key, *(key for path in options.api_key_file for key in read_key_file(Path(path)))]
    admin_key = read_admin_key(Path(options.admin_key_file)) if options.admin_key_file else None
    return ServiceConfig(
        redis_url=options.redis,
        data_dir=options.data_dir.expanduser().absolute(),
        host=options.host,
        port=options.port,
        host_names=tuple(host_name(text) for text in options.allow_host),
        url_file=options.url_file,
        node_token=cluster_token(options.node_token_file, "--node-token-file") or "",
        tenants=Tenants.of(keys, admin_key),
        key_prefix=options.key_prefix,
        max_running_jobs=options.max_running_jobs,
        result_ttl_s=options.result_ttl,
        limits=Limits.of(options.tenant_limit, options.tenant_slo),
        solver_limit_s=options.solver_limit,
        tenant_weights=tuple(_weight(pair) for pair in options.tenant_weight),
    )


def _weight(pair: str) -> tuple[TenantId, float]:
    """Read `NAME=W`. Raises ValueError unless W is a positive number."""
    name, _, text = pair.rpartition("=")
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not name or not 0 < weight < float("inf"):
        raise ValueError(f"a tenant's weight is given as NAME=W with W above 0, not {pair!r}")
    return TenantId(name), weight


def _configure_logging(as_json: bool) -> None:
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(Stderr()),
    )


if __name__ == "__main__":
    sys.exit(main())

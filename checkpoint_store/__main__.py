"""Imports and verifies checkpoints for whoever starts it: `python -m nearline.checkpoint_store import|verify …`.

Speaks JSON lines on stdout: `{"phase", "done_bytes", "total_bytes"}` at most ten times a second, then exactly one of
`{"checkpoint": CheckpointInfo}` (exit 0) or `{"error": ErrorInfo}` (exit 1). With `--asks-for-room` it says
`{"needs_bytes": n}` before it writes and goes on at a line on stdin: `{}`, or `{"error": …}` to refuse. With
`--stays` it imports one after another: each line `{"kind", "source", "base"}` on stdin gets progress and an outcome.
Warnings go to stderr, open or not.
"""

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import structlog

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.publish import CHECKPOINTS
from nearline.checkpoint_store.publish_digest import verify_checkpoint
from nearline.protocol import QUANT_FORMATS, Bytes, CheckpointKind, Digest, from_plain, to_plain
from nearline.protocol.errors import Cancelled, ErrorInfo, InvalidRequest, NotFound
from nearline.protocol.stderr import Stderr

_PROGRESS_INTERVAL_S = 0.1


class _Lines:
    """Writes JSON lines to stdout; progress only so often. A reader that has gone away cancels the work."""

    def __init__(self, stream: TextIO | None, stop: "_Stop") -> None:
        self._stream, self._stop = stream, stop
        self._phase, self._next_at = "", 0.0

    def progress(self, phase: str, done_bytes: Bytes, total_bytes: Bytes) -> None:
        self._stop.heed()
        now = time.monotonic()
        if phase == self._phase and now < self._next_at and done_bytes < total_bytes:
            return
        self._phase, self._next_at = phase, now + _PROGRESS_INTERVAL_S
        self.write({"phase": phase, "done_bytes": done_bytes, "total_bytes": total_bytes})

    def ask_for_room(self, num_bytes: Bytes) -> None:
        """Ask whoever reads stdout for place on disk, and wait for the answer on stdin."""
        self.write({"needs_bytes": num_bytes})
        answer = json.loads(sys.stdin.readline() or "{}")
        if "error" in answer:
            raise from_plain(ErrorInfo, answer["error"]).exception()

    def write(self, plain: dict[str, Any]) -> None:
        if self._stream is None:
            raise Cancelled("stdout is closed, so nobody would learn the outcome")
        try:
            self._stream.write(json.dumps(plain) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            raise Cancelled("nobody reads the progress of this import any more") from None


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    _occupy_standard_streams()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(Stderr()))
    log = structlog.get_logger("checkpoint_store")
    stop = _Stop()
    lines = _Lines(sys.stdout, stop)
    reporter = Reporter(lines.progress, lambda message: log.warning(message, source=getattr(options, "source", None)))
    if getattr(options, "asks_for_room", False):
        reporter = dataclasses.replace(reporter, make_room=lines.ask_for_room)
    status = 0
    for _ in _wishes(options, stop):
        outcome = _outcome(options, reporter, stop)
        status = 0 if "checkpoint" in outcome else 1
        try:
            lines.write(outcome)
        except Cancelled:
            return 1
        if "error" in outcome and ErrorInfo.of(Cancelled("")).code == outcome["error"]["code"]:
            break
    return status


class _Interrupted(BaseException):
    """Raised where SIGTERM or SIGINT found the work; no handler of ordinary errors takes it for one."""


class _Stop:
    """Ends the work at SIGTERM or SIGINT by raising where it stands, once, so that clean-up is left alone.

    That may be inside code which swallows what is raised, as a finaliser does, or fails over it in its own way. So what
    fails after a signal counts as cancelled whatever it says, and the next progress ends what went on nevertheless.
    """

    def __init__(self) -> None:
        self.reason = ""
        """Which signal came; empty while none did."""
        self.is_heeded = False
        """Whether a signal raises at once: while work is under way or a line is awaited, never between."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ring)

    def heed(self) -> None:
        """Raise if a signal came."""
        if self.reason:
            raise _Interrupted(self.reason)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        is_first, self.reason = not self.reason, self.reason or f"cancelled by {signal.Signals(number).name}"
        if is_first and self.is_heeded:
            raise _Interrupted(self.reason)


def _outcome(options: argparse.Namespace, reporter: Reporter, stop: _Stop) -> dict[str, Any]:
    try:
        stop.is_heeded = True
        stop.heed()
        checkpoint = _run(options, reporter)
        stop.is_heeded = False
        return {"checkpoint": to_plain(checkpoint)}
    except SystemExit:
        raise
    except BaseException as error:
        stop.is_heeded = False
        return {"error": to_plain(ErrorInfo.of(Cancelled(stop.reason) if stop.reason else error))}


def _wishes(options: argparse.Namespace, stop: _Stop) -> Iterator[None]:
    """One wish, as the command line says; or one per line on stdin, written into the options, until it ends."""
    if not getattr(options, "stays", False):
        yield
        return
    while line := _next_line(stop):
        wish = json.loads(line)
        options.kind, options.source, options.base = wish["kind"], wish["source"], wish.get("base")
        yield


def _next_line(stop: _Stop) -> str:
    """Wait for a line on stdin; empty when there are no more, or a signal came."""
    try:
        stop.is_heeded = True
        stop.heed()
        return sys.stdin.readline()
    except _Interrupted:
        return ""
    finally:
        stop.is_heeded = False


def _occupy_standard_streams() -> None:
    """Give closed standard streams to /dev/null, lest the next file opened be taken for stdout or stderr."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _run(options: argparse.Namespace, reporter: Reporter) -> Any:
    root = Path(options.root)
    if options.command == "import":
        base = Digest(options.base) if options.base else None
        try:
            source = f"{options.quantize}:{options.source}" if options.quantize else options.source
            return import_checkpoint(root, CheckpointKind(options.kind), source, base, reporter).info
        except OSError as error:
            raise _of_source(error, root) from error
    directory = root / CHECKPOINTS / options.digest
    if "/" in options.digest or not directory.is_dir():
        raise NotFound(f"{root} holds no checkpoint {options.digest!r}")
    return verify_checkpoint(directory, reporter).info


def _of_source(error: OSError, root: Path) -> Exception:
    """Tell a file of the source that cannot be read, which is the caller's to mend, from one of the store."""
    name = error.filename if isinstance(error.filename, str) else ""
    if not name or Path(name).absolute().is_relative_to(root.absolute()):
        return error
    cure = "the node agent must be able to read every file of a source"
    return InvalidRequest(f"cannot read {name[:300]}: {error.strerror}; {cure}", param="source")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nearline.checkpoint_store", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    importer = commands.add_parser("import", help="bring a model or an adapter into the store")
    importer.add_argument("--root", required=True, help="the store's directory")
    importer.add_argument("--kind", choices=[str(kind) for kind in CheckpointKind], default="model")
    importer.add_argument("--source", help="directory, .gguf, file://, http(s):// or hub:org/name[@rev]")
    importer.add_argument("--base", help="digest of the base model (adapters)")
    importer.add_argument("--quantize", choices=list(QUANT_FORMATS), help="store a model's weights in 8 or 4 bits")
    importer.add_argument("--asks-for-room", action="store_true", help="say needs_bytes, wait for a line on stdin")
    importer.add_argument("--stays", action="store_true", help="import what lines on stdin wish: kind, source, base")
    verifier = commands.add_parser("verify", help="check a stored checkpoint against its digests")
    verifier.add_argument("--root", required=True, help="the store's directory")
    verifier.add_argument("--digest", required=True, help="the checkpoint's digest")
    return parser


if __name__ == "__main__":
    status = main()
    # A download that was cancelled still runs in a thread that the interpreter would wait for.
    os._exit(status)

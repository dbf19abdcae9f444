"""The verified marker of a checkpoint directory: under which file stamp its digests were last found right.

No marker, or a file with another stamp, means that the next load checks every chunk. The importer writes none, so the
first load always checks.
"""

import json
from pathlib import Path

import structlog

from nearline.checkpoint_store.weights_file import FileStamp
from nearline.protocol import from_plain, to_plain

_NAME = ".verified"
log = structlog.get_logger()


def read_marker(directory: Path) -> FileStamp | None:
    """Return the stamp under which the checkpoint was verified, or None."""
    try:
        return from_plain(FileStamp, json.loads((directory / _NAME).read_text()))
    except (OSError, ValueError):
        return None


def write_marker(directory: Path, stamp: FileStamp) -> None:
    """Record that the bytes were right under `stamp`. A failure only costs another check."""
    try:
        (directory / _NAME).write_text(json.dumps(to_plain(stamp)))
    except OSError as error:
        log.info("cannot write the verified marker", directory=str(directory), error=error.strerror)


def clear_marker(directory: Path) -> None:
    """Make the next load check every chunk."""
    try:
        (directory / _NAME).unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot remove the verified marker", directory=str(directory), error=error.strerror)

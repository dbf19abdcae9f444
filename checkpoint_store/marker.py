"""Three markers of a checkpoint directory: under which file stamp its digests were last found right, that they are
known to be wrong, and that the weights were given up because their source can give them back.

No verified marker, or a file with another stamp, means that the next load checks every chunk. The importer writes none,
so the first load always checks. A damaged marker means that no load is tried: only a successful verification, or an
import of the same content, removes it.
"""

import contextlib
import json
from pathlib import Path

import structlog

from nearline.checkpoint_store.weights_file import FileStamp
from nearline.protocol import from_plain, to_plain

_NAME = ".verified"
_DAMAGED_NAME = ".damaged"
_EVICTED_NAME = ".evicted"
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


def read_damage(directory: Path) -> str | None:
    """Return what a verification found wrong with the checkpoint, or None."""
    try:
        return (directory / _DAMAGED_NAME).read_text()
    except OSError:
        return None


def write_damage(directory: Path, message: str) -> None:
    """Record that the bytes are wrong. A failure only means that the next load finds out again."""
    try:
        (directory / _DAMAGED_NAME).write_text(message)
    except OSError as error:
        log.warning("cannot write the damaged marker", directory=str(directory), error=error.strerror)


def clear_damage(directory: Path) -> None:
    """The bytes were found right."""
    with contextlib.suppress(OSError):
        (directory / _DAMAGED_NAME).unlink(missing_ok=True)


def mark_evicted(directory: Path) -> None:
    """Record that the weights leave by intention; before they do. Raises OSError."""
    (directory / _EVICTED_NAME).touch()


def is_evicted(directory: Path) -> bool:
    """True when the weights were given up: they are to be fetched, not missed."""
    return (directory / _EVICTED_NAME).exists()

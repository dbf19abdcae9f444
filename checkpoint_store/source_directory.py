"""A directory somebody else wrote: its files, read without ever leaving it."""

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from nearline.protocol import Bytes
from nearline.protocol.errors import CheckpointCorrupt, InvalidRequest

_MAX_SMALL_BYTES: Bytes = 256 * 1024 * 1024


class SourceDirectory:
    """The files below one directory. A snapshot of a hub cache may link to its repository's blobs, nothing else may
    lead outside."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        in_cache = self.path.parent.name == "snapshots" and self.path.parent.parent.name.startswith("models--")
        self._boundary = self.path.parent.parent if in_cache else self.path

    def file(self, name: str) -> Path | None:
        """Find a file by its relative name; None if there is none.

        Raises InvalidRequest for a name or a link that leads outside the directory.
        """
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name or not pure.parts:
            raise InvalidRequest(f"{self.path}: {name!r} is not a name inside the source directory", param="source")
        path = self.path / pure
        if not os.path.lexists(path):
            return None
        real = path.resolve()
        if not real.is_relative_to(self._boundary):
            raise InvalidRequest(
                f"{path} is a link that leads outside the source directory; copy the file there, or give the directory "
                "that holds it",
                param="source",
            )
        return path if real.is_file() else None

    def names(self, suffix: str = "", folder: str = "") -> list[str]:
        """List the names of files (of one subfolder) that end with `suffix`, sorted."""
        base = self.path / folder
        if not base.is_dir() or not base.resolve().is_relative_to(self.path):
            return []
        found = [entry.name for entry in base.iterdir() if entry.name.endswith(suffix)]
        return sorted(f"{folder}/{name}" if folder else name for name in found)

    def read(self, name: str) -> bytes | None:
        """Read a small file. Raises InvalidRequest if it cannot be read or is no small file."""
        path = self.file(name)
        if path is None:
            return None
        try:
            size = path.stat().st_size
            if size > _MAX_SMALL_BYTES:
                raise InvalidRequest(f"{path}: {size} bytes; at most {_MAX_SMALL_BYTES} are expected", param="source")
            return path.read_bytes()
        except OSError as error:
            raise InvalidRequest(f"{path}: {error.strerror}", param="source") from None

    def json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON object. Raises CheckpointCorrupt if it is none."""
        raw = self.read(name)
        if raw is None:
            return None
        return parse_json(raw, str(self.path / name))


def parse_json(raw: bytes, label: str) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointCorrupt naming the file."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{label}: not valid JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointCorrupt(f"{label}: expected a JSON object, found {raw[:20].decode(errors='replace')!r}…")
    return value

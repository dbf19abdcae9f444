"""What a source string means: the one place that decides between a directory, a GGUF file, the hub and the web."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.hf import cached_snapshot, from_hub
from nearline.checkpoint_store.http_source import downloaded
from nearline.protocol.errors import InvalidRequest

_FORMS = "a model or adapter directory, a .gguf file, file:///path, an http(s) URL, or hub:org/name[@revision]"


@contextmanager
def located(source: str, root: Path, reporter: Reporter) -> Iterator[Path]:
    """Give the directory or GGUF file that `source` names, for the time of one import.

    What must be fetched lies below `root` meanwhile. Raises as `locate`, `downloaded` and `from_hub`.
    """
    if source.startswith(("http://", "https://")):
        with downloaded(source, root, reporter) as path:
            yield path
    elif source.startswith("hub:"):
        with from_hub(source.removeprefix("hub:"), root, reporter) as path:
            yield path
    else:
        yield locate(source)


def locate(source: str) -> Path:
    """Find the local directory or GGUF file that `source` names.

    Raises InvalidRequest (param `source`) naming what was tried.
    """
    try:
        return _locate(source)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"cannot read {source[:300]}: {reason}; a source is {_FORMS}", param="source") from None


def _locate(source: str) -> Path:
    path = _local_path(source)
    if path.is_dir():
        return _within(path)
    if path.is_file():
        if _is_gguf(path):
            return path
        raise InvalidRequest(f"{path} is a file, but no GGUF file; a source is {_FORMS}", param="source")
    looks_like_hub = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    hint = f"; for the Hugging Face hub say hub:{source}" if looks_like_hub else ""
    raise InvalidRequest(f"no such file or directory: {path}{hint}; a source is {_FORMS}", param="source")


def _local_path(source: str) -> Path:
    if not source or "\0" in source:
        raise InvalidRequest(f"the source is empty or holds a NUL; a source is {_FORMS}", param="source")
    if source.startswith("file:"):
        parts = urlsplit(source)
        if parts.netloc not in ("", "localhost"):
            raise InvalidRequest(f"{source}: only local files; write file:///path", param="source")
        source = unquote(parts.path)
    return Path(os.path.abspath(os.path.expanduser(source)))


def _within(path: Path) -> Path:
    """Step from a directory to what it stands for: a hub cache to its snapshot, a folder of one GGUF to that file."""
    if (path / "config.json").exists() or (path / "adapter_config.json").exists():
        return path
    if (path / "snapshots").is_dir():
        return cached_snapshot(path)
    ggufs = sorted(entry for entry in path.glob("*.gguf") if entry.is_file())
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        names = ", ".join(entry.name for entry in ggufs[:10])
        raise InvalidRequest(f"{path} holds several GGUF files; name one of them: {names}", param="source")
    return path


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix.lower() == ".gguf"

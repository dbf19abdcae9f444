"""What a source string means: the one place that decides between a directory, a GGUF file and the hub."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.hf import cached_snapshot, download
from nearline.protocol.errors import InvalidRequest

_FORMS = "a model or adapter directory, a .gguf file, file:///path, or hub:org/name[@revision]"


def locate(source: str, reporter: Reporter) -> Path:
    """Find the directory or GGUF file that `source` names, fetching it from the hub if it says so.

    Raises InvalidRequest (param `source`) naming what was tried.
    """
    if source.startswith("hub:"):
        return download(source.removeprefix("hub:"), reporter)
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

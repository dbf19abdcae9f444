"""An http(s) source: the URL of a .gguf file, or the one below which a model's or adapter's files lie."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from nearline.checkpoint_store.adapter import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from nearline.checkpoint_store.convert_files import CONFIG_NAME, SMALL_NAMES
from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.downloads import FileFetcher, download_folder
from nearline.checkpoint_store.http_file import HttpFile
from nearline.checkpoint_store.safetensors_shards import INDEX_NAME, SINGLE_NAME
from nearline.protocol.errors import CheckpointCorrupt, InvalidRequest


@contextlib.contextmanager
def downloaded(url: str, root: Path, reporter: Reporter) -> Iterator[Path]:
    """Fetch a source below `root` and give its path for the time of an import.

    Raises as HttpFile.fetch and download_folder; InvalidRequest for a URL under which there is no source.
    """
    parts = _checked(url)
    with download_folder(url, root) as folder:
        if unquote(parts.path).lower().endswith(".gguf"):
            yield _fetch_gguf(url, folder / "model.gguf", reporter)
        else:
            yield _fetch_directory(url, folder / "files", reporter)


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_sound = parts.port != 0 and not any(char.isspace() for char in url)
    except ValueError:  # a bracket too many, a port too large
        is_sound = False
    if not is_sound:
        raise InvalidRequest("the source is no URL: look at its brackets and its port; a space is %20", param="source")
    if not parts.hostname:
        raise InvalidRequest(f"{url} names no host", param="source")
    if parts.username or parts.password:
        raise InvalidRequest("a source must not hold credentials; put them into ~/.netrc of the node", param="source")
    return parts


def _fetch_gguf(url: str, target: Path, reporter: Reporter) -> Path:
    if not HttpFile(url, target).fetch(lambda done, total: reporter.progress("downloading", done, total)):
        raise InvalidRequest(f"{url}: there is no such file (404)", param="source")
    return target


def _fetch_directory(base: str, folder: Path, reporter: Reporter) -> Path:
    """Fetch what may belong to a model or an adapter; what is missing is the importer's to judge."""
    fetch = FileFetcher(base, folder, reporter).fetch
    is_model, is_adapter = fetch(CONFIG_NAME), fetch(ADAPTER_CONFIG_NAME)
    if not is_model and not is_adapter:
        raise InvalidRequest(
            f"{base} has no {CONFIG_NAME} and no {ADAPTER_CONFIG_NAME}; give the URL of a .gguf file, the one below "
            "which those files lie (…/resolve/main on a hub), or hub:org/name",
            param="source",
        )
    for name in SMALL_NAMES:
        fetch(name)
    if is_adapter:
        fetch(ADAPTER_WEIGHTS_NAME)
    if is_model and not fetch(SINGLE_NAME) and fetch(INDEX_NAME):
        for shard in _shards(folder / INDEX_NAME, base):
            if not fetch(shard):
                raise CheckpointCorrupt(f"{base}: shard {shard} is missing, though {INDEX_NAME} names it")
    return folder


def _shards(path: Path, base: str) -> list[str]:
    try:
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()), key=str)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointCorrupt(
            f"{base}/{INDEX_NAME} is no index of shards: an object is expected whose weight_map names a file per tensor"
        ) from None
    for name in names:
        if not isinstance(name, str) or not name.endswith(".safetensors") or "/" in name or "\0" in name:
            raise InvalidRequest(f"{base}/{INDEX_NAME} names {name!r}, which is no shard beside it", param="source")
    return names

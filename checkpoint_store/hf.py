"""The Hugging Face hub: snapshots in its local cache, and fetching one with progress.

`huggingface_hub` reads HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE itself and resumes interrupted files.
"""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nearline.checkpoint_store.convert_types import Reporter
from nearline.protocol.errors import Fault, Forbidden, InvalidRequest, NearlineError, StorageFull

_ALLOWED = ["*.json", "*.jinja", "*.safetensors"]
_IGNORED = ["*/*.json", "*/*.safetensors", "consolidated*"]
_POLL_S = 0.1


def cached_snapshot(repository: Path) -> Path:
    """Choose the snapshot of a `models--org--name` cache folder: `main`, or the only one there is."""
    snapshots = sorted(entry for entry in (repository / "snapshots").iterdir() if entry.is_dir())
    main = repository / "refs" / "main"
    if main.is_file():
        chosen = repository / "snapshots" / main.read_text().strip()
        if chosen in snapshots:
            return chosen
    if len(snapshots) == 1:
        return snapshots[0]
    names = ", ".join(entry.name for entry in snapshots) or "(none)"
    raise InvalidRequest(f"{repository} holds no single snapshot; name one of snapshots/: {names}", param="source")


def download(name: str, reporter: Reporter) -> Path:
    """Fetch `org/name[@revision]` into the hub's own cache and return the snapshot's directory.

    The work happens in a thread, so that a signal to this process is heard at once.
    Raises InvalidRequest, Forbidden, StorageFull or Fault saying what the hub answered and what to do.
    """
    repo_id, _, revision = name.partition("@")
    result: list[Any] = []
    bars: list[Any] = []

    def fetch() -> None:
        try:
            result.append(_snapshot(repo_id, revision or None, bars))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=fetch, name="hub-download", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        done = max((int(bar.n) for bar in bars), default=0)
        reporter.progress("downloading", done, max((int(bar.total or 0) for bar in bars), default=0))
    if isinstance(result[0], BaseException):
        raise _explain(result[0], repo_id, revision) from result[0]
    return Path(result[0])


def _snapshot(repo_id: str, revision: str | None, bars: list[Any]) -> str:
    from huggingface_hub import snapshot_download  # not needed for local sources, nor installed on a bare GPU box

    return snapshot_download(
        repo_id,
        revision=revision,
        allow_patterns=_ALLOWED,
        ignore_patterns=_IGNORED,
        tqdm_class=_silent_bar(bars.append),
    )


def _silent_bar(register: Callable[[Any], None]) -> Any:
    """Make a tqdm that counts and never prints (a progress bar on a full stderr pipe blocks the process)."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    sink = open(os.devnull, "w")  # noqa: SIM115  (lives as long as the bars)

    class SilentBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": sink})
            if kwargs.get("unit") == "B":
                register(self)

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            return True

    return SilentBar


def _explain(error: BaseException, repo_id: str, revision: str) -> NearlineError:
    from huggingface_hub import constants, errors

    where = f"{constants.ENDPOINT}/{repo_id}" + (f" at {revision}" if revision else "")
    if isinstance(error, errors.GatedRepoError):
        return Forbidden(f"{where} is gated; accept its licence on the hub and set HF_TOKEN", param="source")
    if isinstance(error, errors.RepositoryNotFoundError):
        return InvalidRequest(f"{where} does not exist or is private; check the name or set HF_TOKEN", param="source")
    if isinstance(error, errors.RevisionNotFoundError):
        return InvalidRequest(f"{where}: no such revision", param="source")
    if isinstance(error, errors.HFValidationError):
        return InvalidRequest(f"hub:{repo_id} is not a hub name; write hub:org/name[@revision]", param="source")
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)) and constants.HF_HUB_OFFLINE:
        return InvalidRequest(
            f"{where} is not (wholly) in the local cache and HF_HUB_OFFLINE is set; unset it, or give a directory",
            param="source",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"{constants.HF_HUB_CACHE}: no space left for {repo_id}; free space and import again")
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return Fault(f"{where} cannot be fetched: {reason}; check the network, or give a local directory", param="source")

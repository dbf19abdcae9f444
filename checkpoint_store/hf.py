"""The Hugging Face hub: snapshots in its local cache, and fetching what is not there.

`huggingface_hub` reads HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE and lists a repository; the files are fetched
by our own hands, because it keeps no part of a file whose transfer broke off, and its cache would keep a second copy
of every model for ever.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.downloads import FileFetcher, download_folder
from nearline.protocol.errors import (
    CheckpointCorrupt,
    Fault,
    Forbidden,
    InvalidRequest,
    NearlineError,
    SourceUnavailable,
)

_ALLOWED = ("*.json", "*.jinja", "*.safetensors")
_IGNORED = ("*/*.json", "*/*.safetensors", "consolidated*")


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


@contextlib.contextmanager
def from_hub(name: str, root: Path, reporter: Reporter) -> Iterator[Path]:
    """Give the files of `org/name[@revision]` for the time of an import: from the hub's local cache if they are all
    there, else fetched below `root`, every large file checked against the hub's sha256.

    Raises InvalidRequest, Forbidden, StorageFull, CheckpointCorrupt, SourceUnavailable or Fault saying what the hub
    answered and what to do.
    """
    from huggingface_hub import constants  # not needed for local sources, nor installed on a bare GPU box

    repo_id, _, revision = name.partition("@")
    if constants.HF_HUB_OFFLINE:
        yield _cached(repo_id, revision)
        return
    listing = _list(repo_id, revision)
    files = {sibling.rfilename: sibling for sibling in listing.siblings or [] if _is_wanted(sibling.rfilename)}
    snapshot = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}" / "snapshots" / str(listing.sha)
    if files and all((snapshot / file).exists() for file in files):
        yield snapshot
        return
    with download_folder(f"hub:{name}", root) as folder:  # which revision it is, is known only now
        yield _fetch(f"{constants.ENDPOINT}/{repo_id}", str(listing.sha), files, folder / str(listing.sha), reporter)


def _fetch(repository: str, sha: str, files: dict[str, Any], folder: Path, reporter: Reporter) -> Path:
    from huggingface_hub import get_token

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    fetcher = FileFetcher(f"{repository}/resolve/{sha}", folder, reporter, headers)
    fetcher.total_bytes = sum(sibling.size or 0 for sibling in files.values())
    for name, sibling in sorted(files.items()):
        try:
            is_there = fetcher.fetch(name)
        except Forbidden:
            raise Forbidden(
                f"{repository} lists its files but does not give {name}; accept its licence on the hub and set "
                "HF_TOKEN to a token that may read it",
                param="source",
            ) from None
        if not is_there:
            raise Fault(f"{repository}: {name} is listed but not there (404); import again", param="source")
        _check_sha256(folder / name, sibling, repository)
    return folder


def _check_sha256(path: Path, sibling: Any, repository: str) -> None:
    wanted = sibling.lfs.sha256 if sibling.lfs else None
    if wanted is None:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        path.unlink()
        raise CheckpointCorrupt(
            f"{repository}: {sibling.rfilename} arrived with sha256 {found}, the hub says {wanted}; import again"
        )


def _is_wanted(name: str) -> bool:
    if name.startswith("/") or ".." in name.split("/"):
        return False
    return any(fnmatch(name, p) for p in _ALLOWED) and not any(fnmatch(name, p) for p in _IGNORED)


def _list(repo_id: str, revision: str) -> Any:
    from huggingface_hub import HfApi

    try:
        return HfApi().model_info(repo_id, revision=revision or None, files_metadata=True)
    except Exception as error:
        raise _explain(error, repo_id, revision) from error


def _cached(repo_id: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, revision=revision or None, local_files_only=True))
    except Exception as error:
        raise _explain(error, repo_id, revision) from error


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
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return Forbidden(f"{where}: the hub refuses this HF_TOKEN ({status}); make a new one that may read it")
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return SourceUnavailable(
        f"{where} cannot be fetched: {reason}; check the network, or give a local directory", param="source"
    )

"""The store's directory on disk: who owns it, whether it was closed cleanly, which checkpoints in it are whole.

root/checkpoints/<digest>/   committed checkpoints      root/incoming/    imports under way (the importer's)
root/quarantine/             what was found torn        root/trash/       being deleted
"""

import fcntl
import os
import shutil
from pathlib import Path

import structlog

from nearline.checkpoint_store.incoming import sweep_incoming
from nearline.checkpoint_store.marker import is_evicted
from nearline.checkpoint_store.types import WEIGHTS_NAME, Manifest, read_manifest
from nearline.protocol import Bytes, Digest
from nearline.protocol.errors import CheckpointCorrupt, InvalidRequest, ModelNotFound

log = structlog.get_logger()


class StoreRoot:
    """Owns a store directory for one process; the lock file says whether its last owner closed it."""

    def __init__(self, path: Path) -> None:
        """Take the directory, creating it when absent. Raises InvalidRequest if another process has it."""
        self.path = path
        for name in ("checkpoints", "incoming", "quarantine", "trash"):
            (path / name).mkdir(parents=True, exist_ok=True)
        self._lock_fd = os.open(path / "store.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._lock_fd, 64, 0).decode(errors="replace")
            os.close(self._lock_fd)
            message = f"{path} is used by another store ({owner}); stop it or choose another data directory"
            raise InvalidRequest(message) from None
        self.was_closed_cleanly = os.pread(self._lock_fd, 64, 0) in (b"", b"closed")
        self._write_lock(f"open by process {os.getpid()}")
        shutil.rmtree(path / "trash", ignore_errors=True)
        (path / "trash").mkdir(exist_ok=True)
        if dead := sweep_incoming(path):
            log.info("removed what dead imports left", names=dead)

    def scan(self) -> list[Manifest]:
        """Read every committed checkpoint, in order of digest; what is torn goes to quarantine."""
        manifests = []
        for directory in sorted((self.path / "checkpoints").iterdir()):
            try:
                manifests.append(self.read(Digest(directory.name)))
            except CheckpointCorrupt as error:
                self._quarantine(directory, error.message)
        return manifests

    def read(self, digest: Digest) -> Manifest:
        """Read one checkpoint's manifest and compare it with its weights file's size, if it has one still.

        Raises ModelNotFound if the directory is absent, CheckpointCorrupt if it is torn.
        """
        directory = self.directory(digest)
        if not directory.exists():
            raise ModelNotFound(f"checkpoint {digest} is not in {self.path}; import it first")
        manifest = read_manifest(directory)
        if manifest.digest != digest:
            raise CheckpointCorrupt(f"{directory}: its manifest is of checkpoint {manifest.digest}")
        weights = directory / WEIGHTS_NAME
        if is_evicted(directory):
            weights.unlink(missing_ok=True)
            return manifest
        actual = weights.stat().st_size if weights.exists() else None
        if actual != manifest.num_bytes:
            found = "is missing" if actual is None else f"has {actual} bytes"
            raise CheckpointCorrupt(f"{weights} {found}, its manifest says {manifest.num_bytes} bytes; import it again")
        return manifest

    def directory(self, digest: Digest) -> Path:
        return self.path / "checkpoints" / digest

    def set_aside(self, digest: Digest) -> Path | None:
        """Move a checkpoint out of `checkpoints` in one step; the caller deletes what is returned at leisure."""
        aside = _unused_name(self.path / "trash", digest)
        try:
            return self.directory(digest).rename(aside)
        except FileNotFoundError:
            return None

    def disk_free_bytes(self) -> Bytes:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        self._write_lock("closed")
        os.close(self._lock_fd)

    def _write_lock(self, text: str) -> None:
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, text.encode(), 0)

    def _quarantine(self, directory: Path, reason: str) -> None:
        aside = _unused_name(self.path / "quarantine", directory.name)
        log.warning("torn checkpoint moved to quarantine", directory=str(directory), to=str(aside), reason=reason)
        directory.rename(aside)


def _unused_name(parent: Path, name: str) -> Path:
    candidate, number = parent / name, 1
    while candidate.exists():
        candidate, number = parent / f"{name}-{number}", number + 1
    return candidate

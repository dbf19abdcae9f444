"""Where what is fetched lies until its import has ended, and longer if that broke off: one folder per source.

root/downloads/<hash of source_key>/   locked by the one import that fills it; parts in it are continued by the next
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

import xxhash

from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.http_file import HttpFile
from nearline.protocol import Seconds, source_key
from nearline.protocol.errors import Fault, InvalidRequest, NearlineError, StorageFull

DOWNLOADS = "downloads"
KEPT_S: Seconds = 7 * 86400.0
"""A download that nobody continued for so long is removed."""


@contextlib.contextmanager
def download_folder(source: str, root: Path) -> Iterator[Path]:
    """Give the folder for one source, for the time of its import.

    Afterwards it is removed, unless the import was cancelled or could not be finished here: then the next one need not
    fetch everything again. Raises InvalidRequest when the same source is being imported already.
    """
    _sweep(root / DOWNLOADS)
    folder = root / DOWNLOADS / xxhash.xxh3_64_hexdigest(source_key(source).encode())
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, source):
        try:
            yield folder
        except NearlineError as error:
            if not isinstance(error, Fault) or isinstance(error, StorageFull):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


class FileFetcher:
    """Fetches files below one base URL into one folder; progress counts all of them together."""

    def __init__(self, base: str, folder: Path, reporter: Reporter, headers: Mapping[str, str] | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self._parts = urlsplit(base)
        self._folder = folder
        self._reporter = reporter
        self._headers = headers
        self._done_before = 0
        self.total_bytes = 0
        """Bytes of all files together, where known beforehand."""

    def fetch(self, name: str) -> bool:
        """Fetch one file; False if the server has none of that name. Raises as HttpFile.fetch."""
        path = f"{self._parts.path.rstrip('/')}/{quote(name)}"
        url = urlunsplit((self._parts.scheme, self._parts.netloc, path, self._parts.query, ""))
        target, before = self._folder / name, self._done_before
        target.parent.mkdir(parents=True, exist_ok=True)

        def progress(done: int, total: int) -> None:
            self._reporter.progress("downloading", before + done, max(self.total_bytes, before + total))

        if not HttpFile(url, target, self._headers).fetch(progress):
            return False
        self._done_before += target.stat().st_size
        return True


@contextlib.contextmanager
def _locked(folder: Path, source: str) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{source} is being imported right now; wait for that import"
            raise InvalidRequest(message, param="source") from None
        os.utime(folder)
        yield
    finally:
        os.close(descriptor)


def _sweep(downloads: Path) -> None:
    for folder in downloads.glob("*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_mtime < time.time() - KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)

"""Reads byte ranges of one weights file into memory: direct where the file system allows it, buffered elsewhere.

Knows what a vanished, shortened or unreadable file looks like: a read fills its buffer or raises, it never leaves
zeros.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from nearline.checkpoint_store.types import DATA_ALIGNMENT
from nearline.protocol import Bytes
from nearline.protocol.errors import CheckpointCorrupt

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What changes when a file is replaced or rewritten; equal stamps mean the bytes we verified are still there."""

    num_bytes: Bytes
    mtime_ns: int
    inode: int


class WeightsFile:
    """An open weights file of known size. Safe to use from several threads until `close`."""

    def __init__(self, path: Path, num_bytes: Bytes, is_kept: bool = False) -> None:
        """Open `path`. `is_kept`: read through the page cache, so that the next read need not ask the disk.

        Raises CheckpointCorrupt if it is missing, unreadable or not of `num_bytes`.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise CheckpointCorrupt(f"{path} has vanished; import the checkpoint again") from None
        except OSError as error:
            raise CheckpointCorrupt(f"{path} cannot be opened ({error.strerror}); check the disk") from None
        status = os.fstat(self._fd)
        self.stamp = FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)
        if status.st_size != num_bytes:
            os.close(self._fd)
            raise CheckpointCorrupt(
                f"{path} has {status.st_size} bytes, its manifest says {num_bytes}; import the checkpoint again"
            )
        self.refusal: str | None = "kept in the page cache" if is_kept else None
        self._direct_fd = None if is_kept else self._open_direct()
        if is_kept:
            os.posix_fadvise(self._fd, 0, num_bytes, os.POSIX_FADV_WILLNEED)  # the disk reads it all at once

    @property
    def is_direct(self) -> bool:
        """Whether reads bypass the page cache; `refusal` says why not."""
        return self.refusal is None

    def read_into(self, view: memoryview, offset: Bytes) -> None:
        """Fill `view` from `offset`. Direct I/O needs both on 4096-byte boundaries; the tail is read buffered.

        Raises CheckpointCorrupt when the file ends early or cannot be read.
        """
        try:
            done = self._read_direct(view, offset) if self.is_direct else 0
            while done < len(view):
                count = os.preadv(self._fd, [view[done:]], offset + done)
                if count == 0:
                    raise CheckpointCorrupt(
                        f"{self.path} ends at byte {offset + done}, expected {self.stamp.num_bytes} bytes: "
                        "it was truncated after registration; import the checkpoint again"
                    )
                done += count
        except OSError as error:
            message = f"{self.path} cannot be read at byte {offset} ({error.strerror}); check the disk, import again"
            raise CheckpointCorrupt(message) from None

    def close(self) -> None:
        os.close(self._fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def _open_direct(self) -> int | None:
        # Reopening through /proc gives the very same file even if the path was replaced meanwhile.
        try:
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            self.refusal = error.strerror
            return None

    def _read_direct(self, view: memoryview, offset: Bytes) -> Bytes:
        assert self._direct_fd is not None
        length = len(view) // DATA_ALIGNMENT * DATA_ALIGNMENT
        done = 0
        while done < length and done % DATA_ALIGNMENT == 0:
            try:
                count = os.preadv(self._direct_fd, [view[done:length]], offset + done)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self.refusal = error.strerror
                return done
            if count == 0:
                break
            done += count
        return done


def check_digest(view: memoryview, expected: str, what: str) -> None:
    """Compare bytes with their xxh3-128. Raises CheckpointCorrupt naming `what` and both digests."""
    actual = xxhash.xxh3_128_hexdigest(view)
    if actual != expected:
        raise CheckpointCorrupt(
            f"{what} has digest {actual}, its manifest says {expected}: the bytes were altered; import it again"
        )

"""A hold on one checkpoint in DRAM, and what bringing it there took."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from nearline.protocol import Bytes, Digest, Extent, Seconds, Tier


@dataclass(frozen=True, slots=True)
class ReadStats:
    """What one lease waited for: bytes that were not in DRAM when it began, the tier that held them, and how long.

    All in DRAM: zero bytes, zero seconds, tier DRAM. `num_bytes` includes chunks another lease was already reading.
    """

    seconds: Seconds
    num_bytes: Bytes
    tier: Tier


class Lease:
    """Pins a checkpoint's bytes until `release`. `frames[i]` holds chunk i as soon as its ready byte is 1; a packed
    checkpoint has no frames. `extents` hold the whole file, one after another, when `done` has ended well.

    `done` ends when every chunk is there, or fails with CheckpointCorrupt, or with Cancelled after an early release.
    Its callbacks may run in a reading thread. `directory` is the checkpoint's: it stays while the lease does.
    A streamed lease has no extents: its holder reads the file, and `done` ends when it says so (`finish`).
    """

    def __init__(
        self,
        digest: Digest,
        directory: Path,
        frames: tuple[int, ...],
        extents: tuple[Extent, ...],
        release: Callable[["Lease"], None],
        finish: Callable[["Lease"], None],
    ) -> None:
        self.digest = digest
        self.directory = directory
        self.frames = frames
        self.extents = extents
        self.done: Future[ReadStats] = Future()
        self.done.set_running_or_notify_cancel()  # an asyncio waiter that is cancelled must not cancel the read
        self._release = release
        self._finish = finish

    @property
    def is_streamed(self) -> bool:
        """Whether the checkpoint has more chunks than the pool has frames, and its holder reads the file itself."""
        return not self.extents

    def finish(self) -> None:
        """Say that the holder of a streamed lease has read every byte. Others end by themselves: nothing happens."""
        self._finish(self)

    def release(self) -> None:
        """Give the pin back; reads that only this lease wanted are cancelled. Idempotent."""
        self._release(self)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self.release()

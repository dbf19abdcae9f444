"""The whole pool mapped once, its page tables filled ahead of need, so that a bind faults on nothing.

The first pass over freshly mapped weights costs a fault every 4 KiB, about 0.3 s per GB on a virtual machine: more than
everything else in a start from DRAM. An idle engine maps the pool and faults in what is in memory; binding then *moves*
those mappings into the checkpoint's contiguous range, page tables included.
"""

import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nearline.loader.addresses import (
    MAP_FIXED,
    MAP_NORESERVE,
    TABLE_BYTES,
    fault_in,
    is_in_memory,
    map_range,
    move_range,
    reserve,
    unmap_range,
)
from nearline.protocol.frames import PoolLayout

_SCAN_S = 0.2


class LentFrames(NamedTuple):
    """Neighbouring frames and where they have been moved, all with one call and one kernel area."""

    frame: int
    num_frames: int
    address: int


class PoolWindow:
    """A read-only mapping of every frame, lent out frame by frame. Owns: the range, and a thread that ends with it."""

    def __init__(self, fd: int, layout: PoolLayout) -> None:
        self._fd, self._frame_bytes, self._num_frames = fd, layout.frame_bytes, layout.num_frames
        num_bytes = self._num_frames * self._frame_bytes
        self._range = reserve(num_bytes + TABLE_BYTES), num_bytes + TABLE_BYTES
        self._start = -(-self._range[0] // TABLE_BYTES) * TABLE_BYTES
        self._map(0, self._num_frames)
        self._is_faulted = [False] * self._num_frames
        self._is_lent = [False] * self._num_frames
        self._is_idle = True
        self._wake = threading.Condition()
        self._stop = weakref.finalize(self, unmap_range, *self._range)
        self._stop.atexit = False

    def start(self) -> None:
        """Begin to fault in frames whenever none is lent; ends when the window is garbage."""
        threading.Thread(target=_fault_ahead, args=(weakref.ref(self),), name="nearline-fault", daemon=True).start()

    def lend(self, frames: Sequence[int], address: int) -> list[LentFrames]:
        """Move frames to `address`, one after the other; say which have moved, and where they are now. The others are
        the caller's to map."""
        with self._wake:
            self._is_idle = False
            moved = []
            for index, frame, count in runs([-1 if self._is_lent[frame] else frame for frame in frames]):
                lent = LentFrames(frame, count, address + index * self._frame_bytes)
                if move_range(self._address(frame), count * self._frame_bytes, lent.address):
                    self._is_lent[frame : frame + count] = [True] * count
                    moved.append(lent)
            return moved

    def take_back(self, lent: Sequence[LentFrames]) -> None:
        """Move lent frames here again, from where they are, so that models that take turns fault on nothing either."""
        with self._wake:
            for frame, count, address in lent:
                if not move_range(address, count * self._frame_bytes, self._address(frame)):
                    self._map(frame, count)
                    self._is_faulted[frame : frame + count] = [False] * count
                self._is_lent[frame : frame + count] = [False] * count
            self._is_idle = not any(self._is_lent)

    def fault_in_next(self) -> bool:
        """Fault in one frame that is in memory. False when there is nothing to do now."""
        with self._wake:
            if not self._is_idle:
                return False
            for frame in range(self._num_frames):
                address = self._address(frame)
                if not self._is_faulted[frame] and is_in_memory(address, self._frame_bytes):
                    self._is_faulted[frame] = fault_in(address, self._frame_bytes)
                    return self._is_faulted[frame]
            return False

    def _address(self, frame: int) -> int:
        return self._start + frame * self._frame_bytes

    def _map(self, frame: int, count: int) -> None:
        flags, offset = mmap.MAP_SHARED | MAP_FIXED | MAP_NORESERVE, frame * self._frame_bytes
        map_range(self._address(frame), count * self._frame_bytes, mmap.PROT_READ, flags, self._fd, offset)


def runs(frames: Sequence[int], can_merge: bool = True) -> Iterator[tuple[int, int, int]]:
    """Yield (first chunk, first frame, count) of neighbouring frames; chunks whose frame is -1 are left out."""
    start = 0
    for i in range(1, len(frames) + 1):
        if i == len(frames) or not can_merge or frames[i] != frames[i - 1] + 1 or frames[start] < 0:
            if frames[start] >= 0:
                yield start, frames[start], i - start
            start = i


def _fault_ahead(window: "weakref.ref[PoolWindow]") -> None:
    pause = threading.Event()
    while (alive := window()) is not None:
        has_worked = alive.fault_in_next()
        del alive  # while we sleep, nothing keeps the window
        if not has_worked:
            pause.wait(_SCAN_S)

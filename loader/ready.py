"""Follows the reader: which chunks of a checkpoint have arrived in their frames."""

import sys
import time
from collections.abc import Sequence
from typing import Protocol

from nearline.checkpoint_store import FRAME_FAILED, FRAME_READY, futex
from nearline.loader.mapping import MappedPool
from nearline.protocol import Seconds
from nearline.protocol.errors import CheckpointCorrupt, InstanceFailed

_LOOK_AGAIN_S: Seconds = 0.02
"""A wait that nobody wakes looks again after this long: for a close, for a stall, or where waking is not known."""
_BLIND_LOOK_S: Seconds = 1e-3


class Arrival(Protocol):
    """Tells when chunks of a checkpoint may be used on its device."""

    def wait(self, first: int, last: int) -> None:
        """Block until chunks first…last may be used. Raises CheckpointCorrupt or InstanceFailed if they never will."""

    def is_complete(self) -> bool: ...

    def close(self) -> None: ...


class AllArrived:
    """Every byte is there already."""

    def wait(self, first: int, last: int) -> None:
        return

    def is_complete(self) -> bool:
        return True

    def close(self) -> None:
        return


class FrameArrival:
    """Watches the ready bytes of a checkpoint's frames.

    A wait fails when nothing in the whole pool has moved for `stall_s`: then the node agent is gone or its disk is.
    (Another checkpoint being read first is movement, so a long queue is not a stall.)
    """

    def __init__(self, pool: MappedPool, frames: Sequence[int], name: str, stall_s: Seconds) -> None:
        self._pool = pool
        self._frames = frames
        self._name = name
        self._stall_s = stall_s
        self._num_ready = 0  # chunks before this one are known to be there
        self._is_closed = False

    def wait(self, first: int, last: int) -> None:
        if last < self._num_ready:
            return
        for index in range(max(first, self._num_ready), last + 1):
            if self._pool.ready[self._frames[index]] != FRAME_READY:
                self._wait_one(index)
            if index == self._num_ready:
                self._num_ready += 1

    def is_complete(self) -> bool:
        while self._num_ready < len(self._frames):
            if self._pool.ready[self._frames[self._num_ready]] != FRAME_READY:
                return False
            self._num_ready += 1
        return True

    def close(self) -> None:
        """Make a wait in another thread end with InstanceFailed."""
        self._is_closed = True

    def _wait_one(self, index: int) -> None:
        frame = self._frames[index]
        seen, moved_at = self._pool.ready[:], time.monotonic()
        start = frame // futex.WORD_BYTES * futex.WORD_BYTES
        while (state := self._pool.ready[frame]) != FRAME_READY:
            if state == FRAME_FAILED:
                raise CheckpointCorrupt(
                    f"checkpoint {self._name}: chunk {index} could not be read; the node agent's log names the file "
                    "and the reason"
                )
            if self._is_closed:
                raise InstanceFailed(f"checkpoint {self._name} was closed while it was loading")
            word = seen[start : start + futex.WORD_BYTES].ljust(futex.WORD_BYTES, b"\0")
            if futex.CAN_WAIT:
                futex.wait(self._pool.ready_address + start, int.from_bytes(word, sys.byteorder), _LOOK_AGAIN_S)
            else:
                time.sleep(_BLIND_LOOK_S)
            now, current = time.monotonic(), self._pool.ready[:]
            if current != seen:
                seen, moved_at = current, now
            elif now - moved_at > self._stall_s:
                raise InstanceFailed(
                    f"checkpoint {self._name}: chunk {index} has not arrived and no chunk of this node has for "
                    f"{self._stall_s:.0f} s; the node agent or its disk is stuck"
                )

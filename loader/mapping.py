"""Maps scattered pool frames as one contiguous range of addresses, and unmaps it when the last tensor is gone.

Knows addresses; what the bytes mean is `checkpoint.py`'s business.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Collection, Sequence

import numpy as np
import torch

from nearline.loader.addresses import MAP_FIXED, TABLE_BYTES, map_range, reserve, unmap_range
from nearline.loader.pinned import PinnedFrames
from nearline.loader.window import LentFrames, PoolWindow, runs
from nearline.protocol import Bytes
from nearline.protocol.errors import InstanceFailed, OutOfMemory
from nearline.protocol.frames import PoolLayout


class MappedPool:
    """The node's DRAM pool as handed over by the node agent. Maps no frame until something is attached.

    Owns: nothing; both descriptors stay the caller's and must stay open. Raises InstanceFailed if a memfd is smaller
    than the layout says, so that no later access can fault.
    """

    def __init__(self, pool_fd: int, ready_fd: int, layout: PoolLayout) -> None:
        for name, fd, wanted in (
            ("pool", pool_fd, layout.num_frames * layout.frame_bytes),
            ("ready bytes", ready_fd, layout.num_frames),
        ):
            actual = os.fstat(fd).st_size
            if actual < wanted:
                raise InstanceFailed(f"the {name} memfd has {actual} bytes, the layout needs {wanted}")
        self.fd = pool_fd
        self.layout = layout
        self.num_bytes = layout.num_frames * layout.frame_bytes
        self.ready = mmap.mmap(ready_fd, layout.num_frames, prot=mmap.PROT_READ)
        self.ready_address = np.frombuffer(self.ready, np.uint8).ctypes.data
        self._pinned: PinnedFrames | None = None
        self._window: PoolWindow | None = None

    def fault_ahead(self) -> None:
        """Fill page tables for the frames that are in memory, whenever nothing is attached, so that a bind from DRAM
        faults on nothing. For a process that waits to be bound to a CPU device."""
        if self._window is None:
            self._window = PoolWindow(self.fd, self.layout)
            self._window.start()

    def pinned(self) -> PinnedFrames:
        """The frames as copy sources for CUDA; the first call maps the pool, pinning follows frame by frame."""
        if self._pinned is None:
            memory = self.map_frames(range(self.layout.num_frames), self.layout.frame_bytes, is_writable=True)
            self._pinned = PinnedFrames(memory, self.layout)
        return self._pinned

    def read_into(self, view: memoryview, offset: Bytes) -> None:
        """Copy bytes of the pool from `offset` on, as many as `view` holds, without mapping them."""
        done = 0
        while done < len(view):
            count = os.preadv(self.fd, [view[done:]], offset + done)
            if count == 0:
                raise InstanceFailed(f"the pool's memfd ends at byte {offset + done}")
            done += count

    def map_frames(self, frames: Sequence[int], chunk_bytes: Bytes, is_writable: bool = False) -> torch.Tensor:
        """Map the first `chunk_bytes` of each frame, in order, as one contiguous uint8 tensor. Copies nothing.

        Owns: the mapping belongs to the tensor's storage and ends with the last view of it. It is shared with every
        other process and read-only: writing to it in place is a segmentation fault, not a silent change.
        """
        num_bytes = len(frames) * chunk_bytes
        reserved = num_bytes + TABLE_BYTES
        start = reserve(reserved)
        address = -(-start // TABLE_BYTES) * TABLE_BYTES
        lent: list[LentFrames] = []
        try:
            if self._window is not None and chunk_bytes == self.layout.frame_bytes and not is_writable:
                lent = self._window.lend(frames, address)
            there = {frame for run in lent for frame in range(run.frame, run.frame + run.num_frames)}
            if len(there) < len(frames):
                protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
                self._map_rest(frames, there, address, chunk_bytes, protection)
        except OutOfMemory:
            _end_mapping(start, reserved, self._window, lent)
            raise
        buffer = (ctypes.c_char * num_bytes).from_address(address)
        # torch keeps `buffer` alive with the storage; its end is the end of the mapping.
        weakref.finalize(buffer, _end_mapping, start, reserved, self._window, lent).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _map_rest(
        self, frames: Sequence[int], lent: Collection[int], address: int, chunk_bytes: Bytes, protection: int
    ) -> None:
        """Map what the window did not lend, neighbouring frames with one call and one kernel area."""
        can_merge = chunk_bytes == self.layout.frame_bytes
        for first, frame, count in runs([-1 if f in lent else f for f in frames], can_merge):
            flags, offset = mmap.MAP_SHARED | MAP_FIXED, frame * self.layout.frame_bytes
            map_range(address + first * chunk_bytes, count * chunk_bytes, protection, flags, self.fd, offset)

    def close(self) -> None:
        """Unmap the ready bytes. Tensors that are still alive keep their own mappings."""
        self.ready.close()


def _end_mapping(start: int, num_bytes: Bytes, window: PoolWindow | None, lent: Sequence[LentFrames]) -> None:
    if window is not None:
        window.take_back(lent)
    unmap_range(start, num_bytes)

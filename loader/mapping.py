"""Maps scattered pool frames as one contiguous range of addresses, and unmaps it when the last tensor is gone.

Knows addresses; what the bytes mean is `checkpoint.py`'s business.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence

import torch

from nearline.loader.pinned import PinnedFrames
from nearline.protocol import Bytes
from nearline.protocol.errors import InstanceFailed, OutOfMemory
from nearline.protocol.frames import PoolLayout

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


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
        self.ready = mmap.mmap(ready_fd, layout.num_frames, prot=mmap.PROT_READ)
        self._pinned: PinnedFrames | None = None

    def pinned(self) -> PinnedFrames:
        """The frames as copy sources for CUDA; the first call maps the pool, pinning follows frame by frame."""
        if self._pinned is None:
            memory = self.map_frames(range(self.layout.num_frames), self.layout.frame_bytes, is_writable=True)
            self._pinned = PinnedFrames(memory, self.layout)
        return self._pinned

    def map_frames(self, frames: Sequence[int], chunk_bytes: Bytes, is_writable: bool = False) -> torch.Tensor:
        """Map the first `chunk_bytes` of each frame, in order, as one contiguous uint8 tensor. Copies nothing.

        Owns: the mapping belongs to the tensor's storage and ends with the last view of it. It is shared with every
        other process and read-only: writing to it in place is a segmentation fault, not a silent change.
        """
        num_bytes = len(frames) * chunk_bytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        address = _map(None, num_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        try:
            for start, frame, count in self._runs(frames, chunk_bytes):
                flags, offset = mmap.MAP_SHARED | _MAP_FIXED, frame * self.layout.frame_bytes
                _map(address + start * chunk_bytes, count * chunk_bytes, protection, flags, self.fd, offset)
        except OutOfMemory:
            _libc.munmap(address, num_bytes)
            raise
        buffer = (ctypes.c_char * num_bytes).from_address(address)
        # torch keeps `buffer` alive with the storage; its end is the end of the mapping.
        weakref.finalize(buffer, _libc.munmap, address, num_bytes).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def close(self) -> None:
        """Unmap the ready bytes. Tensors that are still alive keep their own mappings."""
        self.ready.close()

    def _runs(self, frames: Sequence[int], chunk_bytes: Bytes) -> Iterator[tuple[int, int, int]]:
        """Yield (first chunk, first frame, count) of neighbouring frames: one mmap call and one kernel area each."""
        can_merge = chunk_bytes == self.layout.frame_bytes
        start = 0
        for i in range(1, len(frames) + 1):
            if i == len(frames) or not can_merge or frames[i] != frames[i - 1] + 1:
                yield start, frames[start], i - start
                start = i


def _map(address: int | None, num_bytes: Bytes, protection: int, flags: int, fd: int, offset: Bytes) -> int:
    result: int | None = _libc.mmap(address, num_bytes, protection, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OutOfMemory(
            f"cannot map {num_bytes} bytes of the DRAM pool ({os.strerror(number)}); "
            "check the address space limit (ulimit -v) and vm.max_map_count"
        )
    return result

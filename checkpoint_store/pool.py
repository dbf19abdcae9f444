"""The DRAM pool: a memfd of equal frames that every process of the node may map, and one ready byte per frame.

Knows memory, not checkpoints: which chunk lies in which frame is `tiers.py`'s business.
"""

import ctypes
import fcntl
import mmap
import os
import threading

import structlog

from nearline.checkpoint_store import futex
from nearline.checkpoint_store.pool_memory import HUGE_BYTES, PoolMemory
from nearline.protocol import Bytes
from nearline.protocol.frames import PoolLayout

_TOUCH_NICENESS = 10
_MAX_REFUSED = 32
"""After so many refusals in a row no more huge pages are asked for."""
log = structlog.get_logger()


class DramPool:
    """A fixed number of frames in one memfd, sealed against shrinking so that no process that maps it can fault.

    Memory is allocated when first touched. First touch is slower than a good disk, so a background thread keeps
    `touch_ahead_bytes` beyond the frames in use touched, in huge pages if it can; the rest of the pool costs nothing
    until it is needed.
    Owns: both file descriptors, until `close`; other processes keep their own.
    """

    def __init__(self, num_frames: int, frame_bytes: Bytes, touch_ahead_bytes: Bytes = 0) -> None:
        self.layout = PoolLayout(num_frames, frame_bytes)
        self.num_bytes = num_frames * frame_bytes
        self.fd = _sealed_memfd("nearline-pool", self.num_bytes)
        self.ready_fd = _sealed_memfd("nearline-ready", num_frames)
        self._memory = PoolMemory(self.fd, self.num_bytes)
        self._ready = mmap.mmap(self.ready_fd, num_frames)
        self._ready_address = ctypes.addressof(ctypes.c_char.from_buffer(self._ready))
        self._touch_ahead_bytes = touch_ahead_bytes
        self._wake = threading.Condition()
        self._touched_bytes = self._num_refused = 0
        self._touch_target = min(touch_ahead_bytes, self.num_bytes)
        self._is_closed = False
        self._toucher = threading.Thread(target=self._touch, name="nearline-touch", daemon=True)
        self._toucher.start()

    @property
    def touched_bytes(self) -> Bytes:
        """Bytes from the start of the pool whose memory is known to be allocated."""
        return self._touched_bytes

    def frame(self, index: int) -> memoryview:
        """A writable view of one frame; release it before `close`."""
        return self.bytes_at(index * self.layout.frame_bytes, self.layout.frame_bytes)

    def bytes_at(self, start: Bytes, num_bytes: Bytes) -> memoryview:
        """A writable view of a part; release it before `close`."""
        return self._memory.view[start : start + num_bytes]

    def ready(self, index: int) -> int:
        return self._ready[index]

    def set_ready(self, index: int, value: int) -> None:
        """Publish a frame's state to every process that maps the ready bytes, and wake those that wait for it.

        The frame's bytes come first.
        """
        self._ready[index] = value
        futex.wake(self._ready_address + index // futex.WORD_BYTES * futex.WORD_BYTES)

    def expect_use(self, num_frames: int) -> None:
        """Tell the toucher that the first `num_frames` frames are or will be in use; it stays ahead of them."""
        target = min(num_frames * self.layout.frame_bytes + self._touch_ahead_bytes, self.num_bytes)
        with self._wake:
            if self._touch_ahead_bytes and target > self._touch_target:
                self._touch_target = target
                self._wake.notify()

    def close(self) -> None:
        """Stop touching, unmap and close. Idempotent."""
        with self._wake:
            if self._is_closed:
                return
            self._is_closed = True
            self._wake.notify()
        self._toucher.join()
        self._memory.close()
        self._ready.close()
        os.close(self.fd)
        os.close(self.ready_fd)

    def _touch(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _TOUCH_NICENESS)
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._is_closed or self._touched_bytes < self._touch_target)
                if self._is_closed:
                    return
                start, target = self._touched_bytes, self._touch_target
            step = min(HUGE_BYTES, target - start)
            if not self._make_huge(start, step) and not self._memory.allocate(start, step):
                return
            self._touched_bytes = start + step

    def _make_huge(self, start: Bytes, num_bytes: Bytes) -> bool:
        if num_bytes < HUGE_BYTES or start % HUGE_BYTES or self._num_refused >= _MAX_REFUSED:
            return False
        is_huge = self._memory.make_huge(start)
        self._num_refused = 0 if is_huge else self._num_refused + 1
        if self._num_refused == _MAX_REFUSED:
            log.info("the DRAM pool stays on small pages from here on", at_byte=start)
        return is_huge


def _sealed_memfd(name: str, num_bytes: Bytes) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd

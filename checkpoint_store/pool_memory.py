"""The pool's memfd as this process maps it: on a huge page's boundary, its memory allocated and made huge ahead of use.

Where the system gives shared memory no huge pages by itself, MADV_COLLAPSE still makes them, page by page
and without changing a byte: mapping the pool then costs a fault per 2 MiB instead of one per 64 KiB, and direct reads,
copies and matrix products find their addresses sooner.
"""

import ctypes
import mmap
import os

import structlog

from nearline.protocol import Bytes
from nearline.protocol.errors import OutOfMemory

HUGE_BYTES: Bytes = 2 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
log = structlog.get_logger()


class PoolMemory:
    """Owns one shared, writable mapping of a whole memfd, until `close`."""

    def __init__(self, fd: int, num_bytes: Bytes) -> None:
        """Raises OutOfMemory when there is no room for the addresses."""
        self._fd = fd
        self._reserved = num_bytes + HUGE_BYTES
        self._start = _map(None, self._reserved, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self.address = -(-self._start // HUGE_BYTES) * HUGE_BYTES
        _map(self.address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
        self.view = memoryview((ctypes.c_char * num_bytes).from_address(self.address)).cast("B")
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
            if _libc.madvise(self.address, num_bytes, advice) != 0:  # only advice: kernels built without it refuse
                log.debug("memory advice refused", advice=advice, error=os.strerror(ctypes.get_errno()))

    def allocate(self, start: Bytes, num_bytes: Bytes) -> bool:
        """Have memory behind a range; no byte changes, so others may write to it meanwhile. False when there is none.

        Both are multiples of a page.
        """
        if _libc.madvise(self.address + start, num_bytes, _MADV_POPULATE_WRITE) == 0:
            return True
        try:
            os.posix_fallocate(self._fd, start, num_bytes)  # kernels before 5.14
            return True
        except OSError as error:
            log.warning("cannot touch the DRAM pool ahead of need; reads go on", error=error.strerror, at_byte=start)
            return False

    def make_huge(self, start: Bytes) -> bool:
        """Have one huge page behind the HUGE_BYTES from `start`, a multiple of that, whatever was there before; no byte
        changes. False when the kernel will not: it cannot (before 6.1), a read is under way there, or memory is too
        scattered."""
        address = self.address + start
        # Of a range without any page the kernel makes none; one small page is enough, the rest need not be touched.
        _libc.madvise(address, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
        return bool(_libc.madvise(address, HUGE_BYTES, _MADV_COLLAPSE) == 0)

    def close(self) -> None:
        """Unmap. Nobody may use a view any more."""
        self.view.release()
        _libc.munmap(self._start, self._reserved)


def _map(address: int | None, num_bytes: Bytes, protection: int, flags: int, fd: int) -> int:
    result: int | None = _libc.mmap(address, num_bytes, protection, flags, fd, 0)
    if result is None or result == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise OutOfMemory(
            f"cannot map the DRAM pool of {num_bytes} bytes ({reason}); check the address space limit (ulimit -v) or "
            "make the pool smaller"
        )
    return result

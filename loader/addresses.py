"""The few calls about address ranges that Python lacks. Linux only, as the rest of the platform."""

import ctypes
import mmap
import os

from nearline.protocol import Bytes
from nearline.protocol.errors import OutOfMemory

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
TABLE_BYTES: Bytes = 2 << 20
"""What one page table spans: mappings move with their tables whole when both ends lie on this boundary."""
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MADV_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def reserve(num_bytes: Bytes) -> int:
    """Take a range of addresses with nothing behind it. Raises OutOfMemory."""
    return map_range(None, num_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)


def map_range(address: int | None, num_bytes: Bytes, protection: int, flags: int, fd: int, offset: Bytes) -> int:
    """mmap(2). Raises OutOfMemory naming the limits that can be in the way."""
    result: int | None = _libc.mmap(address, num_bytes, protection, flags, fd, offset)
    if result is None or result == _FAILED:
        number = ctypes.get_errno()
        raise OutOfMemory(
            f"cannot map {num_bytes} bytes of the DRAM pool ({os.strerror(number)}); "
            "check the address space limit (ulimit -v) and vm.max_map_count"
        )
    return result


def unmap_range(address: int, num_bytes: Bytes) -> None:
    _libc.munmap(address, num_bytes)


def move_range(source: int, num_bytes: Bytes, target: int) -> bool:
    """Move a mapping, page tables and all, over `target`. False when the kernel will not; nothing has moved then.

    The source stays mapped, its page tables empty: a hole there would be filled by anyone's next mmap (malloc's too),
    and whoever mapped the source again would wipe that out. Kernels before 5.13 will not for shared mappings.
    """
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    moved: int | None = _libc.mremap(source, num_bytes, num_bytes, flags, target)
    return moved == target


def is_in_memory(address: int, num_bytes: Bytes) -> bool:
    """Whether the first and the last page behind a mapping are in memory already (mapped here or not)."""
    page = mmap.PAGESIZE
    flags = ctypes.create_string_buffer(1)
    for start in (address, address + num_bytes - page):
        if _libc.mincore(start, page, flags) != 0 or not flags.raw[0] & 1:
            return False
    return True


def fault_in(address: int, num_bytes: Bytes) -> bool:
    """Fill the page tables of a mapping for reading. False on kernels before 5.14."""
    return bool(_libc.madvise(address, num_bytes, _MADV_POPULATE_READ) == 0)

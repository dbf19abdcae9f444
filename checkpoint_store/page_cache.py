"""Whether the page cache holds a range of a file. Asking by a read that must not wait would set off a read-ahead, which
costs the disk as much as the read itself."""

import ctypes
import mmap

from nearline.protocol import Bytes

_LIBC = ctypes.CDLL(None, use_errno=True)
_PAGE: Bytes = mmap.PAGESIZE


def is_cached(descriptor: int, offset: Bytes, count: Bytes) -> bool:
    """Whether all bytes of [offset, offset + count) are in memory. The kernel says yes of a file that is not the
    caller's to write, cached or not."""
    start = offset // _PAGE * _PAGE
    length = offset + count - start
    pages = (ctypes.c_ubyte * -(-length // _PAGE))()
    # It holds the mapping, which goes with it: one that is looked at cannot be closed.
    first = ctypes.c_ubyte.from_buffer(mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=start))
    status = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(length), pages)
    return status == 0 and all(page & 1 for page in pages)

"""Memory that direct I/O reads into and writes from: on a page's boundary, and on huge pages where there are any, which
makes each transfer a few large ones for the disk."""

import contextlib
import mmap

from nearline.protocol import Bytes


def direct_buffer(num_bytes: Bytes) -> memoryview:
    """Allocate a buffer. Owns: its memory, which goes with the last view of it."""
    memory = mmap.mmap(-1, num_bytes)
    with contextlib.suppress(OSError):  # only advice: kernels built without it refuse
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)

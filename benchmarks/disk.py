"""What the medium under a file gives: direct sequential reads of that very file, in this very run."""

import mmap
import os
import threading
import time
from pathlib import Path

BLOCK_BYTES = 16 * 1024 * 1024


def direct_read_bytes_per_s(path: Path, num_threads: int = 4) -> float:
    """Read the file once with O_DIRECT, blocks interleaved over threads, into memory touched before."""
    size = path.stat().st_size // 4096 * 4096
    buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(num_threads)]
    for buffer in buffers:
        buffer.write(b"\1" * BLOCK_BYTES)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(index: int) -> None:
        for offset in range(index * BLOCK_BYTES, size, BLOCK_BYTES * num_threads):
            view = memoryview(buffers[index])[: min(BLOCK_BYTES, size - offset)]
            os.preadv(descriptor, [view], offset)
            view.release()

    threads = [threading.Thread(target=read, args=(i,)) for i in range(num_threads)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    os.close(descriptor)
    for buffer in buffers:
        buffer.close()
    return size / elapsed


def forget_pages(directory: Path) -> None:
    """Drop the page cache of every file below `directory` (the files are synced first, or the kernel keeps them)."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

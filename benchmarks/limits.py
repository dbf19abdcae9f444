"""What the machine itself gives: fio on the disk, copies in memory. The limits that loaders are held against."""

import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

READS = {
    "4 threads, 16 MiB": ["--ioengine=psync", "--numjobs=4", "--thread", "--bs=16M"],
    "depth 8, 16 MiB": ["--ioengine=libaio", "--iodepth=8", "--bs=16M"],
}
"""Ways in which fio reads a file directly, front to back."""
_COPY_BYTES, _SPAN_BYTES = 256 << 20, 64 << 20


def has_fio() -> bool:
    return shutil.which("fio") is not None


def fio_read_bytes_per_s(path: Path, how: str) -> float:
    """Read a file once with direct I/O in one of READS."""
    num_bytes = path.stat().st_size // _SPAN_BYTES * _SPAN_BYTES
    options = list(READS[how])
    if not num_bytes:  # too small for blocks of that size: one block of what there is
        num_bytes = path.stat().st_size // 4096 * 4096
        options = ["--ioengine=psync", f"--bs={num_bytes}"]
    elif "--numjobs=4" in options:
        options.append(f"--offset_increment={num_bytes // 4}")
        num_bytes //= 4
    return _fio(path, ["--rw=read", "--readonly", f"--size={num_bytes}", *options], "read")


def fio_write_bytes_per_s(folder: Path, num_bytes: int) -> float:
    """Write a new file of so many bytes with direct I/O, synced at the end."""
    path = folder / "fio.tmp"
    size = max(num_bytes // (16 << 20), 1) * (16 << 20)
    options = ["--rw=write", "--ioengine=libaio", "--iodepth=4", "--bs=16M", f"--size={size}", "--end_fsync=1"]
    try:
        return _fio(path, options, "write")
    finally:
        path.unlink(missing_ok=True)


class MemoryCopy:
    """Copies between two touched buffers with all cores. Owns half a gigabyte."""

    def __init__(self) -> None:
        self._source = np.ones(_COPY_BYTES, np.uint8)
        self._target = np.zeros(_COPY_BYTES, np.uint8)
        self._target[:] = 1

    def bytes_per_s(self, num_threads: int | None = None) -> float:
        """Copy the buffer once with each number of threads up to `num_threads`; the best counts."""
        most = num_threads or os.cpu_count() or 1
        return max(self._once(count) for count in range(1, most + 1) for _ in range(2))

    def _once(self, num_threads: int) -> float:
        part = _COPY_BYTES // num_threads

        def copy(index: int) -> None:
            np.copyto(self._target[index * part : (index + 1) * part], self._source[index * part : (index + 1) * part])

        threads = [threading.Thread(target=copy, args=(i,)) for i in range(num_threads)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return part * num_threads / (time.perf_counter() - started)


class MemoryRead:
    """Reads one touched buffer with all cores, as a forward pass reads its weights. Owns half a gigabyte."""

    def __init__(self) -> None:
        self._buffer = np.ones(2 * _COPY_BYTES, np.uint8)

    def bytes_per_s(self) -> float:
        """Hash the buffer, which costs less than to read it; the best of five passes counts."""
        parts = np.array_split(self._buffer, os.cpu_count() or 1)
        best_s = min(self._once(parts) for _ in range(5))
        return len(self._buffer) / best_s

    def _once(self, parts: list[Any]) -> float:
        threads = [threading.Thread(target=xxhash.xxh3_64_digest, args=(part,)) for part in parts]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started


def _fio(path: Path, options: list[str], kind: str) -> float:
    command = ["fio", "--name=limit", f"--filename={path}", "--direct=1", "--group_reporting", "--output-format=json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return float(report["jobs"][0][kind]["bw_bytes"])

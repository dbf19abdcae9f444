"""The DRAM pool: sealed, shared, touched ahead of need."""

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearline.checkpoint_store import FRAME_READY
from nearline.checkpoint_store.config import StoreConfig, resolve_pool_frames
from nearline.checkpoint_store.pool import DramPool
from nearline.checkpoint_store.pool_memory import PoolMemory
from tests.checkpoint_store.checkpoints import wait_for

FRAME = 64 * 1024


@pytest.fixture
def pool() -> Iterator[DramPool]:
    pool = DramPool(8, FRAME)
    yield pool
    pool.close()


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_a_frame_written_here_is_read_by_another_process_through_the_descriptors(pool: DramPool) -> None:
    with pool.frame(3) as frame:
        frame[:5] = b"hello"
    pool.set_ready(3, FRAME_READY)
    code = (
        "import mmap, sys\n"
        "memory = mmap.mmap(int(sys.argv[1]), 8 * 65536, prot=mmap.PROT_READ)\n"
        "ready = mmap.mmap(int(sys.argv[2]), 8, prot=mmap.PROT_READ)\n"
        "print(memory[3 * 65536 : 3 * 65536 + 5].decode(), list(ready[:]))\n"
    )
    command = [sys.executable, "-c", code, str(pool.fd), str(pool.ready_fd)]
    done = subprocess.run(command, pass_fds=(pool.fd, pool.ready_fd), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "hello [0, 0, 0, 1, 0, 0, 0, 0]"


@pytest.mark.parametrize("name", ["fd", "ready_fd"])
def test_nobody_can_shrink_the_memory_under_a_process_that_maps_it(pool: DramPool, name: str) -> None:
    with pytest.raises(OSError, match="not permitted") as refused:
        os.ftruncate(getattr(pool, name), 1)
    assert refused.value.errno == errno.EPERM
    assert fcntl.fcntl(getattr(pool, name), fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def test_frames_do_not_overlap_and_cover_the_pool(pool: DramPool) -> None:
    for i in range(8):
        with pool.frame(i) as frame:
            frame[:] = bytes([i + 1]) * FRAME
    with mmap.mmap(pool.fd, 8 * FRAME, prot=mmap.PROT_READ) as whole:
        assert whole[:] == b"".join(bytes([i + 1]) * FRAME for i in range(8))


def test_memory_is_touched_only_so_far_ahead_of_use() -> None:
    pool = DramPool(64, FRAME, touch_ahead_bytes=8 * FRAME)
    try:
        assert wait_for(lambda: pool.touched_bytes == 8 * FRAME)
        assert resident_bytes(pool.fd) == 8 * FRAME
        pool.expect_use(10)
        assert wait_for(lambda: pool.touched_bytes == 18 * FRAME)
        pool.expect_use(1000)
        assert wait_for(lambda: pool.touched_bytes == 64 * FRAME)
    finally:
        pool.close()


def test_touching_changes_no_byte_of_a_frame_in_use() -> None:
    pool = DramPool(64, FRAME, touch_ahead_bytes=FRAME)
    try:
        for i in range(64):
            with pool.frame(i) as frame:
                frame[:4] = b"keep"
            pool.expect_use(i)
        pool.expect_use(64)
        assert wait_for(lambda: pool.touched_bytes == 64 * FRAME)
        assert all(bytes(pool.frame(i)[:4]) == b"keep" for i in range(64))
    finally:
        pool.close()


def test_a_pool_that_touches_nothing_takes_no_memory(pool: DramPool) -> None:
    assert resident_bytes(pool.fd) == 0


def test_closing_twice_is_harmless_and_frees_the_memory() -> None:
    pool = DramPool(4, FRAME, touch_ahead_bytes=4 * FRAME)
    fd = pool.fd
    pool.close()
    pool.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


@pytest.mark.parametrize(
    ("configured", "ram", "available", "frames"),
    [
        (None, 64 << 30, 60 << 30, 1024),  # 25 % of 64 GiB = 16 GiB of 16 MiB frames
        (None, 64 << 30, 8 << 30, 256),  # 50 % of the 8 GiB available
        (100 << 20, 64 << 30, 60 << 30, 6),  # as configured, whole frames only
        (1, 64 << 30, 60 << 30, 1),
    ],
)
def test_pool_size_follows_the_machine_unless_configured(
    configured: int | None, ram: int, available: int, frames: int, tmp_path: object
) -> None:
    config = StoreConfig(root=tmp_path, dram_pool_bytes=configured)  # type: ignore[arg-type]
    assert resolve_pool_frames(config, ram, available) == frames


def test_a_container_sizes_the_pool_by_its_own_memory() -> None:
    config = StoreConfig(root=Path("/nowhere"), memory_bytes=4 << 30, frame_bytes=1 << 20)
    assert resolve_pool_frames(config, 256 << 30, 200 << 30) == 1024


@pytest.mark.parametrize("frame_bytes", [0, -4096, 1000, 4097])
def test_a_frame_size_that_direct_io_cannot_use_is_refused(frame_bytes: int, tmp_path: object) -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        StoreConfig(root=tmp_path, frame_bytes=frame_bytes)  # type: ignore[arg-type]


def test_what_is_touched_ahead_lies_on_huge_pages_where_the_kernel_makes_them() -> None:
    pool = DramPool(4, 4 << 20, touch_ahead_bytes=16 << 20)
    try:
        deadline = time.monotonic() + 60
        while pool.touched_bytes < pool.num_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pool.touched_bytes == pool.num_bytes
        if pool._num_refused:
            pytest.skip("this kernel makes no huge pages of shared memory, or memory is too scattered")
        with mmap.mmap(pool.fd, pool.num_bytes, prot=mmap.PROT_READ) as other:
            assert other[:: 1 << 20] == bytes(16)
        assert pool._memory.address % (2 << 20) == 0
        maps = Path("/proc/self/smaps").read_text().split("nearline-pool")[1]
        huge = next(line for line in maps.splitlines() if line.startswith("ShmemPmdMapped"))
        assert int(huge.split()[1]) == 16 << 10
    finally:
        pool.close()


def test_making_huge_pages_changes_no_byte() -> None:
    fd = os.memfd_create("pool")
    os.ftruncate(fd, 8 << 20)
    memory = PoolMemory(fd, 8 << 20)
    written = os.urandom(3 << 20)
    memory.view[1 << 20 : 4 << 20] = written
    for start in range(0, 8 << 20, 2 << 20):
        memory.make_huge(start)
    assert os.pread(fd, 3 << 20, 1 << 20) == written
    assert os.pread(fd, 1 << 20, 0) == bytes(1 << 20)
    memory.close()
    os.close(fd)

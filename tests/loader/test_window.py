"""A pool mapped ahead: binds fault on nothing, bytes stay right, frames come back."""

import gc
import os
import resource
import time
from pathlib import Path

import torch

from nearline.loader import MappedPool
from nearline.loader.window import PoolWindow
from nearline.protocol.frames import PoolLayout

FRAME_BYTES, NUM_FRAMES = 4 << 20, 6
LAYOUT = PoolLayout(NUM_FRAMES, FRAME_BYTES)


def pool_of(num_written: int) -> tuple[int, int]:
    """A memfd whose first frames hold their own number plus one in every byte; the others were never touched."""
    fd, ready = os.memfd_create("pool"), os.memfd_create("ready")
    os.ftruncate(fd, NUM_FRAMES * FRAME_BYTES)
    os.ftruncate(ready, NUM_FRAMES)
    for frame in range(num_written):
        os.pwrite(fd, bytes([frame + 1]) * FRAME_BYTES, frame * FRAME_BYTES)
    return fd, ready


def fault_everything(window: PoolWindow) -> int:
    count = 0
    while window.fault_in_next():
        count += 1
    return count


def test_it_faults_in_what_is_in_memory_and_nothing_else() -> None:
    fd, _ = pool_of(num_written=4)
    assert fault_everything(PoolWindow(fd, LAYOUT)) == 4
    assert os.fstat(fd).st_blocks * 512 == 4 * FRAME_BYTES


def test_reading_what_it_lends_faults_on_nothing_and_gives_the_right_bytes() -> None:
    fd, ready = pool_of(num_written=NUM_FRAMES)
    pool = MappedPool(fd, ready, LAYOUT)
    cold = pool.map_frames((4, 0, 2), FRAME_BYTES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cold.max()
    cold_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    pool._window = PoolWindow(fd, LAYOUT)
    fault_everything(pool._window)
    data = pool.map_frames((4, 0, 2), FRAME_BYTES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    data.max()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert data.view(3, FRAME_BYTES)[:, 7].tolist() == [5, 1, 3]
    assert faults < max(20, cold_faults // 10)


def test_frames_come_back_when_the_last_tensor_is_gone_and_can_be_lent_again() -> None:
    fd, ready = pool_of(num_written=NUM_FRAMES)
    pool = MappedPool(fd, ready, LAYOUT)
    pool._window = PoolWindow(fd, LAYOUT)
    for _ in range(20):
        data = pool.map_frames((1, 3), FRAME_BYTES)
        again = pool.map_frames((3, 5), FRAME_BYTES)  # frame 3 is lent already: mapped a second time
        view = data[FRAME_BYTES:]
        del data
        gc.collect()
        assert view.unique().tolist() == [4]
        assert again.view(2, FRAME_BYTES)[:, 0].tolist() == [4, 6]
        del view, again
        gc.collect()
    assert not any(pool._window._is_lent)
    assert fault_everything(pool._window) > 0


def test_nothing_is_faulted_in_while_something_is_bound() -> None:
    fd, ready = pool_of(num_written=NUM_FRAMES)
    pool = MappedPool(fd, ready, LAYOUT)
    pool.fault_ahead()
    window = pool._window
    assert window is not None
    deadline = time.monotonic() + 60
    while not all(window._is_faulted) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(window._is_faulted)
    data = pool.map_frames((0,), FRAME_BYTES)
    assert window.fault_in_next() is False
    assert torch.equal(data[:3], torch.tensor([1, 1, 1], dtype=torch.uint8))


def test_models_that_take_turns_fault_on_nothing_without_any_idle_time() -> None:
    fd, ready = pool_of(num_written=NUM_FRAMES)
    pool = MappedPool(fd, ready, LAYOUT)
    pool._window = PoolWindow(fd, LAYOUT)
    fault_everything(pool._window)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        for frames in ((0, 1, 2), (5, 4, 3)):
            data = pool.map_frames(frames, FRAME_BYTES)
            assert data.view(3, FRAME_BYTES)[:, ::4096].float().mean(1).tolist() == [frame + 1 for frame in frames]
            del data
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 300, (
        "mapped afresh it were a fault for every 16 pages"
    )


def test_neighbours_move_together_even_after_they_went_one_by_one() -> None:
    fd, ready = pool_of(num_written=NUM_FRAMES)
    pool = MappedPool(fd, ready, LAYOUT)
    window = pool._window = PoolWindow(fd, LAYOUT)
    fault_everything(window)
    pool.map_frames((4, 3, 2), FRAME_BYTES)  # gone at once: the frames are back, each from a place of its own
    data = pool.map_frames((1, 2, 3, 4), FRAME_BYTES)
    assert data.view(4, FRAME_BYTES)[:, -1].tolist() == [2, 3, 4, 5]
    num_areas = sum(1 for line in Path("/proc/self/maps").read_text().splitlines() if _is_within(line, data))
    assert num_areas == 1


def _is_within(line: str, data: torch.Tensor) -> bool:
    start, end = (int(text, 16) for text in line.split()[0].split("-"))
    return data.data_ptr() < end and start < data.data_ptr() + data.numel()

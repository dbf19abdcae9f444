"""Attaching frames and reading directories: no copy, no growth, refusals that say why."""

import gc
import mmap
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch

from nearline.checkpoint_store import CheckpointStore, Manifest
from nearline.loader import MappedPool, attach, load_directory, load_extents
from nearline.protocol import CheckpointKind, Extent
from nearline.protocol.errors import CheckpointCorrupt, InstanceFailed
from nearline.protocol.frames import PoolLayout

OpenStore = Callable[..., CheckpointStore]
MapPool = Callable[[CheckpointStore], MappedPool]


def directory(root: Path, manifest: Manifest) -> Path:
    return root / "checkpoints" / manifest.digest


def maps_of_pool() -> list[str]:
    return [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "nearline-pool" in line and " r--s " in f" {line} "
    ]


def scatter(store: CheckpointStore, fillers: list[Manifest]) -> None:
    """Leave holes in the pool, so that the next checkpoint's frames are not neighbours."""
    leases = [store.acquire(m.digest) for m in fillers]
    for lease in leases:
        lease.done.result(60)
        lease.release()
    for manifest in fillers[::2]:
        store.evict(manifest.digest)


def test_scattered_frames_appear_as_one_range_shared_with_the_pool(
    root: Path, open_store: OpenStore, map_pool: MapPool, checkpoints: ModuleType
) -> None:
    fillers = [checkpoints.commit_random(root / "checkpoints", 2, seed) for seed in range(8)]
    data = checkpoints.random_bytes(500_000, 99)
    manifest = checkpoints.commit(root / "checkpoints", {"w": ("U8", (500_000,), data)})
    store = open_store(num_frames=16)
    scatter(store, fillers)
    lease = store.acquire(manifest.digest)
    assert any(b != a + 1 for a, b in zip(lease.frames, lease.frames[1:], strict=False))
    loaded = attach(map_pool(store), directory(root, manifest), lease.frames, "cpu")
    loaded.wait_for(["w"])
    assert loaded.is_complete()
    assert bytes(loaded.tensor("w").numpy()) == data
    with store.pool.frame(lease.frames[0]) as frame:  # the very same memory: a change there shows here
        frame[4096] ^= 0xFF
    assert int(loaded.tensor("w")[0]) == data[0] ^ 0xFF


def test_attaching_and_closing_two_hundred_times_leaves_no_mapping_and_no_memory(
    root: Path, open_store: OpenStore, map_pool: MapPool, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit(root / "checkpoints", {"w": ("F32", (500_000,), bytes(2_000_000))})
    store = open_store()
    pool, lease = map_pool(store), store.acquire(manifest.digest)
    lease.done.result(60)

    def cycle() -> None:
        loaded = attach(pool, directory(root, manifest), lease.frames, "cpu")
        loaded.wait_for(["w"])
        assert float(loaded.tensor("w").sum()) == 0.0
        loaded.close()

    for _ in range(20):
        cycle()
    gc.collect()
    assert maps_of_pool() == []
    before = psutil.Process().memory_info().rss
    for _ in range(200):
        cycle()
    gc.collect()
    assert maps_of_pool() == []
    assert psutil.Process().memory_info().rss - before < 2_000_000  # less than one copy of the weights


def test_a_mapping_ends_with_the_last_view_of_it(
    root: Path, open_store: OpenStore, map_pool: MapPool, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit(root / "checkpoints", {"w": ("F32", (50_000,), bytes(200_000))})
    store = open_store()
    lease = store.acquire(manifest.digest)
    loaded = attach(map_pool(store), directory(root, manifest), lease.frames, "cpu")
    view = loaded.tensor("w").view(100, 500)[3]
    loaded.close()
    del loaded
    assert len(maps_of_pool()) == 1
    assert float(view.sum()) == 0.0
    del view
    gc.collect()
    assert maps_of_pool() == []


def test_a_pool_maps_nothing_before_something_is_attached(open_store: OpenStore, map_pool: MapPool) -> None:
    map_pool(open_store())
    assert maps_of_pool() == []


def test_attaching_warns_of_nothing(
    root: Path, open_store: OpenStore, map_pool: MapPool, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit_random(root / "checkpoints", 2, 0)
    store = open_store()
    lease = store.acquire(manifest.digest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = attach(map_pool(store), directory(root, manifest), lease.frames, "cpu")
        loaded.tensor("w")


def test_chunks_smaller_than_frames_are_mapped_without_gaps(
    root: Path, open_store: OpenStore, map_pool: MapPool, checkpoints: ModuleType
) -> None:
    data = checkpoints.random_bytes(300_000, 5)
    manifest = checkpoints.commit(root / "checkpoints", {"w": ("U8", (300_000,), data)})
    store = open_store(num_frames=8, frame_bytes=2 * checkpoints.TINY_CHUNK)
    loaded = attach(map_pool(store), directory(root, manifest), store.acquire(manifest.digest).frames, "cpu")
    loaded.wait_for(["w"])
    assert bytes(loaded.tensor("w").numpy()) == data


READ_IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from nearline.loader import MappedPool, attach
from nearline.protocol.frames import PoolLayout
pool_fd, ready_fd, num_frames, frame_bytes, *frames = map(int, sys.argv[2:])
pool = MappedPool(pool_fd, ready_fd, PoolLayout(num_frames, frame_bytes))
loaded = attach(pool, Path(sys.argv[1]), frames, "cpu")
loaded.wait_for(["w"])
print(int(loaded.tensor("w").sum()), [m for m in ("structlog", "psutil", "aiohttp", "pydantic") if m in sys.modules])
"""


def test_two_processes_see_one_copy_and_the_loader_needs_only_the_bare_libraries(
    root: Path, open_store: OpenStore, checkpoints: ModuleType
) -> None:
    data = checkpoints.random_bytes(500_000, 3)
    manifest = checkpoints.commit(root / "checkpoints", {"w": ("U8", (500_000,), data)})
    store = open_store()
    fds, layout = (store.pool.fd, store.pool.ready_fd), store.pool.layout
    numbers = [*fds, layout.num_frames, layout.frame_bytes, *store.acquire(manifest.digest).frames]
    command = [sys.executable, "-c", READ_IN_ANOTHER_PROCESS, str(directory(root, manifest)), *map(str, numbers)]
    engines = [subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [engine.communicate(timeout=60)[0].strip() for engine in engines] == [f"{sum(data)} []"] * 2


def test_a_write_into_shared_weights_ends_the_process_instead_of_changing_them(
    root: Path, open_store: OpenStore, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit(root / "checkpoints", {"w": ("U8", (100,), bytes(100))})
    store = open_store()
    fds, layout, lease = (store.pool.fd, store.pool.ready_fd), store.pool.layout, store.acquire(manifest.digest)
    lease.done.result(60)
    numbers = [*fds, layout.num_frames, layout.frame_bytes, *lease.frames]
    code = READ_IN_ANOTHER_PROCESS + "loaded.tensor('w').fill_(7)\n"
    command = [sys.executable, "-c", code, str(directory(root, manifest)), *map(str, numbers)]
    assert subprocess.run(command, pass_fds=fds, capture_output=True, check=False).returncode == -11
    assert bytes(store.pool.frame(lease.frames[0])[4096:4196]) == bytes(100)


@pytest.mark.parametrize("frames", [[], [0], [0, 1, 2, 3], [0, 1, 64], [-1, 0, 1]])
def test_frames_that_do_not_fit_the_manifest_are_refused(
    frames: list[int], root: Path, open_store: OpenStore, map_pool: MapPool, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit_random(root / "checkpoints", 3, 0)
    pool = map_pool(open_store())
    with pytest.raises(InstanceFailed, match=f"has 3 chunks; got {len(frames)} frames of a pool of 64"):
        attach(pool, directory(root, manifest), frames, "cpu")


def test_a_pool_smaller_than_its_layout_is_refused_before_it_can_fault() -> None:
    fd = os.memfd_create("small")
    os.ftruncate(fd, 4096)
    with pytest.raises(InstanceFailed, match="the pool memfd has 4096 bytes, the layout needs 8192"):
        MappedPool(fd, fd, PoolLayout(2, 4096))
    os.close(fd)


def test_a_directory_loads_into_private_memory(root: Path, checkpoints: ModuleType) -> None:
    manifest = checkpoints.commit(root / "checkpoints", {"w": ("F32", (50_000,), bytes(200_000))})
    path = directory(root, manifest) / "model.safetensors"
    loaded = load_directory(path.parent, "cpu")
    os.truncate(path, 0)  # nothing faults afterwards
    loaded.tensor("w").add_(1.0)  # and it is ours to change
    assert float(loaded.tensor("w").sum()) == 50_000.0
    assert loaded.is_complete()


@pytest.mark.parametrize("num_bytes", [1, 50_000, 150_000])
def test_extents_of_the_pool_are_copied_into_memory_of_ones_own(
    num_bytes: int, root: Path, open_store: OpenStore, map_pool: MapPool, checkpoints: ModuleType
) -> None:
    data = checkpoints.random_bytes(num_bytes, 3)
    tensors = {"w": ("U8", (num_bytes,), data)}
    manifest = checkpoints.commit(root / "checkpoints", tensors, kind=CheckpointKind.ADAPTER)
    store = open_store()
    taken: list[torch.Tensor] = []

    def take(wanted: int) -> torch.Tensor:
        taken.append(torch.zeros(wanted + 4096, dtype=torch.uint8))
        return taken[-1]

    with store.acquire(manifest.digest) as lease:
        lease.done.result(60)
        pool, path = map_pool(store), directory(root, manifest)
        loaded = load_extents(pool, path, lease.extents, "cpu", take)
        with pytest.raises(InstanceFailed, match="disagree"):
            load_extents(pool, path, lease.extents[1:] or [Extent(0, 1)], "cpu", take)
        with pytest.raises(InstanceFailed, match="disagree"):
            load_extents(pool, path, [Extent(store.pool.num_bytes, manifest.num_bytes)], "cpu", take)
    store.evict(manifest.digest)
    assert bytes(loaded.tensor("w").numpy()) == data
    assert loaded.tensor("w").data_ptr() > taken[0].data_ptr()
    assert not maps_of_pool()


@pytest.mark.parametrize("left", [0, 1, 4096, 100_000])
def test_a_truncated_directory_is_refused(left: int, root: Path, checkpoints: ModuleType) -> None:
    manifest = checkpoints.commit_random(root / "checkpoints", 3, 0)
    os.truncate(directory(root, manifest) / "model.safetensors", left)
    with pytest.raises(CheckpointCorrupt, match=f"has {left} bytes, its manifest says {manifest.num_bytes}"):
        load_directory(directory(root, manifest), "cpu")


def test_an_altered_byte_in_a_directory_is_refused_by_chunk(root: Path, checkpoints: ModuleType) -> None:
    manifest = checkpoints.commit_random(root / "checkpoints", 3, 0)
    path = directory(root, manifest) / "model.safetensors"
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        data[70_000] ^= 1
    with pytest.raises(CheckpointCorrupt, match=r"chunk 1 \(byte 65536\) has digest"):
        load_directory(path.parent, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_cuda_the_bytes_arrive_and_frames_may_be_reused_after_close(
    root: Path, open_store: OpenStore, map_pool: MapPool, checkpoints: ModuleType
) -> None:
    data = checkpoints.random_bytes(500_000, 3)
    manifest = checkpoints.commit(root / "checkpoints", {"w": ("U8", (500_000,), data)})
    store = open_store()
    pool, lease = map_pool(store), store.acquire(manifest.digest)
    for _ in range(3):
        loaded = attach(pool, directory(root, manifest), lease.frames, "cuda")
        loaded.wait_for(["w"])
        assert bytes(loaded.tensor("w").cpu().numpy()) == data
        torch.cuda.synchronize()
        assert loaded.is_complete()
        loaded.close()
    assert pool.pinned().source(lease.frames[0], 4096, torch.device("cuda")).is_pinned()
    assert bytes(load_directory(directory(root, manifest), "cuda").tensor("w").cpu().numpy()) == data


def test_a_small_checkpoint_comes_back_from_the_page_cache_without_the_disk(
    root: Path, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit(root / "checkpoints", {"w": ("U8", (50_000,), checkpoints.random_bytes(50_000, 3))})
    load_directory(directory(root, manifest), "cpu").close()
    counters = Path("/proc/self/io")

    def read_bytes() -> int:
        return int(next(line.split()[1] for line in counters.read_text().splitlines() if line.startswith("read_bytes")))

    before = read_bytes()
    for _ in range(5):
        load_directory(directory(root, manifest), "cpu").close()
    assert read_bytes() == before

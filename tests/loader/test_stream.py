"""A checkpoint larger than the pool reaches the device whole, or not at all, and leaves nothing behind."""

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from nearline.checkpoint_store import WEIGHTS_NAME, CheckpointStore, Lease, Manifest
from nearline.loader import LoadedCheckpoint, MappedPool, attach
from nearline.loader.stream import FileStream
from nearline.protocol import Tier
from nearline.protocol.errors import CheckpointCorrupt, InstanceFailed, OutOfMemory

WAIT_S = 60.0
NUM_FRAMES = 4
OpenStore = Callable[..., CheckpointStore]


class HostDevice:
    """Plain memory as the device. Copies of chunks from `gate_at` on wait for `gate`."""

    def __init__(self, manifest: Manifest, gate_at: int | None = None) -> None:
        self.memory = torch.zeros(manifest.num_bytes, dtype=torch.uint8)
        self.lent: list[weakref.ref[torch.Tensor]] = []
        self.copied: list[int] = []
        self.gate = threading.Event()
        self._gate_at = manifest.num_bytes if gate_at is None else gate_at * manifest.chunk_bytes
        self._chunk_bytes = manifest.chunk_bytes

    def lend(self, num_bytes: int) -> torch.Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self.lent.append(weakref.ref(buffer))
        return buffer

    def copy(self, start: int, source: torch.Tensor) -> None:
        if start >= self._gate_at:
            assert self.gate.wait(WAIT_S)
        self.memory[start : start + source.numel()].copy_(source)
        self.copied.append(start // self._chunk_bytes)

    def num_lent(self) -> int:
        gc.collect()
        return sum(buffer() is not None for buffer in self.lent)


def streamed(lease: Lease, manifest: Manifest, device: HostDevice) -> LoadedCheckpoint:
    stream = FileStream(lease.directory / WEIGHTS_NAME, manifest, device, WAIT_S, num_readers=3)
    return LoadedCheckpoint(manifest, device.memory, stream)


@pytest.fixture
def large(root: Path, checkpoints: ModuleType) -> Manifest:
    """Ten tensors in more than three times as many chunks as the pool has frames."""
    size = 84_000
    tensors = {f"t{i}": ("U8", (size // 10, 10), checkpoints.random_bytes(size, i)) for i in range(10)}
    manifest: Manifest = checkpoints.commit(root / "checkpoints", tensors)
    assert len(manifest.chunk_digests) > 3 * NUM_FRAMES
    return manifest


@pytest.fixture
def store(large: Manifest, open_store: OpenStore) -> CheckpointStore:
    opened = open_store(num_frames=NUM_FRAMES)
    assert opened._probe is not None
    opened._probe.join()  # it has the file open, too
    return opened


def assert_returned(store: CheckpointStore) -> None:
    store.check()
    assert store.dram_free_bytes() == store.dram_pool_bytes
    assert not any(row.is_pinned for row in store.residency())


def open_files() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def test_every_tensor_arrives_byte_for_byte_through_a_window_of_three_chunks(
    store: CheckpointStore, large: Manifest
) -> None:
    with store.acquire(large.digest, may_stream=True) as lease:
        assert lease.is_streamed
        assert not lease.done.done()
        device = HostDevice(large)
        loaded = streamed(lease, large, device)
        oracle = load_file(lease.directory / WEIGHTS_NAME)
        for name, expected in oracle.items():
            loaded.wait_for([name])
            assert torch.equal(loaded.tensor(name), expected)
        loaded.wait_for(list(oracle))
        assert loaded.is_complete()
        loaded.close()
        assert len(device.lent) == 3
        assert device.num_lent() == 0
        lease.finish()
        stats = lease.done.result(WAIT_S)
        assert (stats.num_bytes, stats.tier) == (large.num_bytes, Tier.SSD)
    assert_returned(store)


def test_a_flipped_bit_half_way_is_named_and_everything_comes_back(store: CheckpointStore, large: Manifest) -> None:
    path = store.directory(large.digest) / WEIGHTS_NAME
    with path.open("r+b") as file:
        file.seek(7 * large.chunk_bytes + 99)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    lease = store.acquire(large.digest, may_stream=True)
    device = HostDevice(large)
    loaded = streamed(lease, large, device)
    with pytest.raises(CheckpointCorrupt, match=f"{WEIGHTS_NAME}: chunk 7 "):
        loaded.wait_for(loaded.names())
    with pytest.raises(CheckpointCorrupt, match="chunk 7 "):
        loaded.is_complete()
    loaded.close()
    assert 7 not in device.copied, "bytes that are not right never reach the device"
    assert device.num_lent() == 0
    assert str(path) not in open_files()
    lease.release()
    assert lease.done.exception(WAIT_S) is not None
    assert_returned(store)


def test_a_close_half_way_ends_waits_and_gives_everything_back(store: CheckpointStore, large: Manifest) -> None:
    lease = store.acquire(large.digest, may_stream=True)
    device = HostDevice(large, gate_at=5)
    loaded = streamed(lease, large, device)
    loaded.wait_for(["t0"])
    closing = threading.Thread(target=loaded.close)
    closing.start()
    with pytest.raises(InstanceFailed, match="closed while it was loading"):
        loaded.wait_for(["t9"])
    device.gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert set(device.copied) <= set(range(8)), "three chunks were under way, no other was begun"
    assert device.num_lent() == 0
    assert str(store.directory(large.digest) / WEIGHTS_NAME) not in open_files()
    lease.release()
    assert_returned(store)


def test_a_device_that_fails_is_an_end_too(store: CheckpointStore, large: Manifest) -> None:
    device = HostDevice(large)
    device.memory = device.memory[: 5 * large.chunk_bytes]
    with store.acquire(large.digest, may_stream=True) as lease:
        stream = FileStream(lease.directory / WEIGHTS_NAME, large, device, WAIT_S)
        with pytest.raises(InstanceFailed, match="to the device failed"):
            stream.wait(0, len(large.chunk_digests) - 1)
        stream.close()
    assert device.num_lent() == 0


def test_a_device_that_never_copies_is_a_stall(store: CheckpointStore, large: Manifest) -> None:
    device = HostDevice(large, gate_at=0)
    with store.acquire(large.digest, may_stream=True) as lease:
        stream = FileStream(lease.directory / WEIGHTS_NAME, large, device, stall_s=0.05)
        with pytest.raises(InstanceFailed, match="the disk or the device is stuck"):
            stream.wait(0, 0)
        device.gate.set()
        stream.close()


def test_a_cpu_refuses_with_the_numbers(
    store: CheckpointStore, large: Manifest, map_pool: Callable[[CheckpointStore], MappedPool]
) -> None:
    num_chunks = len(large.chunk_digests)
    with pytest.raises(OutOfMemory, match=rf"{num_chunks} chunks \({large.num_bytes} bytes\).* {NUM_FRAMES} frames"):
        store.acquire(large.digest)
    with pytest.raises(InstanceFailed, match="got 0 frames"):
        attach(map_pool(store), store.directory(large.digest), (), "cpu")
    assert_returned(store)


def test_a_streamed_checkpoint_keeps_its_files_until_its_lease_ends(store: CheckpointStore, large: Manifest) -> None:
    directory = store.directory(large.digest)
    lease = store.acquire(large.digest, may_stream=True)
    store.delete(large.digest)
    assert (directory / WEIGHTS_NAME).exists()
    lease.release()
    assert not directory.exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_every_byte(
    store: CheckpointStore, large: Manifest, map_pool: Callable[[CheckpointStore], MappedPool]
) -> None:
    with store.acquire(large.digest, may_stream=True) as lease:
        loaded = attach(map_pool(store), lease.directory, lease.frames, "cuda")
        loaded.wait_for(loaded.names())
        for name, expected in load_file(lease.directory / WEIGHTS_NAME).items():
            assert torch.equal(loaded.tensor(name).cpu(), expected)
        loaded.close()

"""The two ways a checkpoint becomes tensors: from frames of the DRAM pool, or straight from its directory."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nearline.checkpoint_store import (
    DATA_ALIGNMENT,
    WEIGHTS_NAME,
    Manifest,
    WeightsFile,
    check_digest,
    read_manifest,
)
from nearline.loader.checkpoint import LoadedCheckpoint
from nearline.loader.device_copy import DeviceCopy
from nearline.loader.mapping import MappedPool
from nearline.loader.pinned import fresh_memory
from nearline.loader.ready import AllArrived, FrameArrival
from nearline.loader.stream import CudaRange, FileStream
from nearline.protocol import Bytes, Extent, Seconds
from nearline.protocol.errors import InstanceFailed, OutOfMemory

_STALL_S: Seconds = 30.0


def attach(
    pool: MappedPool,
    directory: Path,
    frames: Sequence[int],
    device: torch.device | str,
    stall_s: Seconds = _STALL_S,
) -> LoadedCheckpoint:
    """See the checkpoint of `directory` in `frames` (one per chunk, in order) as tensors on `device`, at once.

    Bytes may still be arriving: `wait_for` follows them. On a CPU nothing is copied and every process shares the same
    memory; on CUDA one range is allocated and copies start immediately. No frames at all mean that the pool cannot hold
    the checkpoint: its file is streamed to the device, every digest checked (CUDA only). Raises CheckpointCorrupt for
    a bad manifest, InstanceFailed for frames that do not fit it, OutOfMemory when the device or the address space is
    full.
    """
    device = torch.device(device)
    manifest = read_manifest(directory)
    if not frames and device.type != "cpu":
        target = _device_range(manifest.num_bytes, device)
        stream = FileStream(directory / WEIGHTS_NAME, manifest, CudaRange(target), stall_s)
        return LoadedCheckpoint(manifest, target, stream)
    _check_frames(pool, manifest, frames)
    arrival = FrameArrival(pool, tuple(frames), manifest.digest, stall_s)
    if device.type == "cpu":
        return LoadedCheckpoint(manifest, pool.map_frames(frames, manifest.chunk_bytes), arrival)
    target = _device_range(manifest.num_bytes, device)
    copy = DeviceCopy(pool.pinned(), tuple(frames), manifest.chunk_bytes, arrival, target)
    return LoadedCheckpoint(manifest, target, copy)


def load_directory(
    directory: Path, device: torch.device | str, take: Callable[[Bytes], torch.Tensor] | None = None
) -> LoadedCheckpoint:
    """Read a checkpoint into private memory, every digest checked: for adapters, tests and tools.

    `take` lends memory: at least so many bytes, uint8, on a page boundary. One of a single chunk is left in the
    page cache: an adapter that comes back costs no disk, and thousands of them no frame of the pool. Raises
    CheckpointCorrupt naming the file when it is missing, of another size, or altered.
    """
    manifest = read_manifest(directory)
    is_small = len(manifest.chunk_digests) == 1
    file = WeightsFile(directory / WEIGHTS_NAME, manifest.num_bytes, is_kept=is_small)
    try:
        data = fresh_memory(manifest.num_bytes) if take is None else take(manifest.num_bytes)[: manifest.num_bytes]
        with memoryview(data.numpy()) as view:  # type: ignore[arg-type]
            for index, digest in enumerate(manifest.chunk_digests):
                offset = index * manifest.chunk_bytes
                with view[offset : offset + manifest.chunk_bytes] as chunk:
                    file.read_into(chunk, offset)
                    check_digest(chunk, digest, f"{file.path}: chunk {index} (byte {offset})")
    finally:
        file.close()
    return LoadedCheckpoint(manifest, data.to(device), AllArrived())


def load_extents(
    pool: MappedPool,
    directory: Path,
    extents: Sequence[Extent],
    device: torch.device | str,
    take: Callable[[Bytes], torch.Tensor],
) -> LoadedCheckpoint:
    """Copy the checkpoint of `directory` from parts of the pool, its file one after another, into private memory.

    Nothing is checked but sizes: the store has checked the digests. The kernel copies, without a mapping: page faults
    cost more than the bytes. Raises InstanceFailed for extents that do not fit it.
    """
    manifest = read_manifest(directory)
    ends = [extent.offset + extent.num_bytes for extent in extents]
    if sum(e.num_bytes for e in extents) != manifest.num_bytes or max(ends) > pool.num_bytes:
        raise InstanceFailed(
            f"checkpoint {manifest.digest} has {manifest.num_bytes} bytes; got {list(extents)} of a pool of "
            f"{pool.num_bytes}: the node agent and this process disagree"
        )
    data = take(manifest.num_bytes)[: manifest.num_bytes]
    done = 0
    with memoryview(data.numpy()) as view:  # type: ignore[arg-type]
        for extent in extents:
            with view[done : done + extent.num_bytes] as part:
                pool.read_into(part, extent.offset)
            done += extent.num_bytes
    return LoadedCheckpoint(manifest, data.to(device), AllArrived())


def _check_frames(pool: MappedPool, manifest: Manifest, frames: Sequence[int]) -> None:
    layout, chunk_bytes = pool.layout, manifest.chunk_bytes
    if len(frames) != len(manifest.chunk_digests) or any(not 0 <= f < layout.num_frames for f in frames):
        raise InstanceFailed(
            f"checkpoint {manifest.digest} has {len(manifest.chunk_digests)} chunks; got {len(frames)} frames of a "
            f"pool of {layout.num_frames}: the node agent and this process disagree"
        )
    if chunk_bytes > layout.frame_bytes or chunk_bytes % DATA_ALIGNMENT:
        raise InstanceFailed(
            f"checkpoint {manifest.digest} has chunks of {chunk_bytes} bytes, frames hold {layout.frame_bytes}"
        )


def _device_range(num_bytes: Bytes, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device)
        raise OutOfMemory(
            f"weights of {num_bytes} bytes do not fit on {device}: {free} of {total} bytes are free; "
            "stop another instance on this device"
        ) from None

"""Checks every chunk of a weights file on disk against the manifest, apart from the pool."""

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from nearline.checkpoint_store.buffers import direct_buffer
from nearline.checkpoint_store.types import Manifest
from nearline.checkpoint_store.weights_file import FileStamp, WeightsFile, check_digest
from nearline.protocol import Bytes
from nearline.protocol.errors import CheckpointCorrupt

_NUM_READERS = 4
_MAX_NAMED = 5


def verify_weights(path: Path, manifest: Manifest, progress: Callable[[Bytes, Bytes], None] | None) -> FileStamp:
    """Read the whole file and compare every digest; return the stamp of the file that was right.

    Uses one buffer of a chunk per reader. Raises CheckpointCorrupt that counts and names the bad chunks.
    """
    file = WeightsFile(path, manifest.num_bytes)
    executor = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="nearline-verify")
    try:
        buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(_NUM_READERS):
            buffers.put(direct_buffer(min(manifest.chunk_bytes, manifest.num_bytes)))
        checks = [executor.submit(_check, file, manifest, i, buffers) for i in range(len(manifest.chunk_digests))]
        done, bad = 0, []
        for check in as_completed(checks):
            num_bytes, error = check.result()
            done += num_bytes
            bad += [error] if error else []
            if progress:
                progress(done, manifest.num_bytes)
    finally:
        executor.shutdown(cancel_futures=True)
        file.close()
    if bad:
        named = "; ".join(sorted(bad)[:_MAX_NAMED])
        raise CheckpointCorrupt(f"{path}: {len(bad)} of {len(checks)} chunks are wrong: {named}")
    return file.stamp


def _check(
    file: WeightsFile, manifest: Manifest, index: int, buffers: "queue.SimpleQueue[memoryview]"
) -> tuple[Bytes, str | None]:
    offset = index * manifest.chunk_bytes
    num_bytes = min(manifest.chunk_bytes, manifest.num_bytes - offset)
    buffer = buffers.get()
    try:
        file.read_into(buffer[:num_bytes], offset)
        check_digest(buffer[:num_bytes], manifest.chunk_digests[index], f"chunk {index} (byte {offset})")
    except CheckpointCorrupt as error:
        return num_bytes, error.message
    finally:
        buffers.put(buffer)
    return num_bytes, None

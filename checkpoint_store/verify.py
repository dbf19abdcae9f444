"""Checks every chunk of a weights file on disk against the manifest, apart from the pool."""

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

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
        checks = [executor.submit(_check, file, manifest, i) for i in range(len(manifest.chunk_digests))]
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


def _check(file: WeightsFile, manifest: Manifest, index: int) -> tuple[Bytes, str | None]:
    offset = index * manifest.chunk_bytes
    num_bytes = min(manifest.chunk_bytes, manifest.num_bytes - offset)
    with mmap.mmap(-1, num_bytes) as buffer, memoryview(buffer) as view:
        try:
            file.read_into(view, offset)
            check_digest(view, manifest.chunk_digests[index], f"chunk {index} (byte {offset})")
        except CheckpointCorrupt as error:
            return num_bytes, error.message
    return num_bytes, None

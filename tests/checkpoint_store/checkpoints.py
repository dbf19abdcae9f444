"""Writes small committed checkpoints without the importer: a safetensors file and its manifest, nothing else."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from nearline.checkpoint_store import (
    FORMAT_VERSION,
    WEIGHTS_NAME,
    CheckpointStore,
    Lease,
    Manifest,
    TensorEntry,
    write_manifest,
)
from nearline.checkpoint_store.publish_digest import content_digest
from nearline.protocol import CheckpointInfo, CheckpointKind, Digest

TINY_CHUNK = 16 * 4096
RawTensor = tuple[str, tuple[int, ...], bytes]
"""(safetensors dtype, shape, bytes)"""


def commit(
    directory: Path,
    tensors: Mapping[str, RawTensor],
    chunk_bytes: int = TINY_CHUNK,
    kind: CheckpointKind = CheckpointKind.MODEL,
) -> Manifest:
    """Write `directory/<digest>` with these tensors, in this order, and return its manifest."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    blob = len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())
    start = 8 + len(text)
    entries = [
        TensorEntry(name, dtype, shape, start + header[name]["data_offsets"][0], len(data))  # type: ignore[index]
        for name, (dtype, shape, data) in tensors.items()
    ]
    chunks = [blob[i : i + chunk_bytes] for i in range(0, len(blob), chunk_bytes)]
    digests = tuple(xxhash.xxh3_128_hexdigest(chunk) for chunk in chunks)
    digest = content_digest(digests, {})
    info = CheckpointInfo(digest, kind, len(blob), "llama", "LlamaForCausalLM", "test", "float32", ())
    manifest = Manifest(FORMAT_VERSION, info, len(blob), chunk_bytes, digests, tuple(entries))
    target = directory / digest
    target.mkdir(parents=True)
    (target / WEIGHTS_NAME).write_bytes(blob)
    write_manifest(target, manifest)
    return manifest


def random_bytes(num_bytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def commit_random(directory: Path, num_chunks: int, seed: int, tail: int = 1234) -> Manifest:
    """A checkpoint of one tensor that fills `num_chunks` chunks, the last one with an odd length."""
    num_bytes = (num_chunks - 1) * TINY_CHUNK + tail - 4096 * (num_chunks > 1)
    return commit(directory, {"w": ("U8", (num_bytes,), random_bytes(num_bytes, seed))})


def acquired_at_once(store: CheckpointStore, digests: Sequence[Digest]) -> list[Lease]:
    """Acquire each in a thread of its own."""
    with ThreadPoolExecutor(len(digests)) as threads:
        return list(threads.map(store.acquire, digests))


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Whether the condition comes true; the limit only ends a hang."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.002)
    return False

"""Turns a draft into a committed checkpoint directory: staged, synced, and renamed into place.

A crash at any moment leaves either no checkpoint or a whole one; what it leaves in `incoming/` names its process,
so that `sweep_incoming` can tell a dead import from one at work.
"""

import contextlib
import dataclasses
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from nearline.checkpoint_store.convert_types import Block, Draft, Reporter
from nearline.checkpoint_store.incoming import INCOMING, staging_name
from nearline.checkpoint_store.publish_digest import content_digest, verify_checkpoint
from nearline.checkpoint_store.safetensors_header import build_header
from nearline.checkpoint_store.types import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    MANIFEST_NAME,
    WEIGHTS_NAME,
    Manifest,
    read_manifest,
    write_manifest,
)
from nearline.checkpoint_store.weights_writer import WeightsWriter
from nearline.protocol import Bytes
from nearline.protocol.errors import CheckpointCorrupt, NearlineError, StorageFull

CHECKPOINTS = "checkpoints"
_SPARE_BYTES: Bytes = 1024 * 1024
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def publish(root: Path, draft: Draft, reporter: Reporter | None = None) -> Manifest:
    """Write `draft` under `root` and commit it as `checkpoints/<digest>`. The same content twice is one checkpoint.

    Raises StorageFull (needed and available bytes), CheckpointCorrupt when a tensor gives other bytes than it promised.
    Whatever it raises, nothing of the attempt stays on disk. Every byte crosses the disk once: whether it arrived is
    checked by the first load, which reads it anyway.
    """
    reporter = reporter or Reporter()
    (root / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    (root / INCOMING).mkdir(exist_ok=True)
    header, entries = build_header([(t.name, t.dtype, t.shape) for t in draft.tensors])
    total = len(header) + sum(t.num_bytes for t in draft.tensors)
    needed = total + sum(map(len, draft.files.values())) + _SPARE_BYTES
    reporter.make_room(needed)
    _check_space(root, needed)
    staging = root / INCOMING / staging_name(str(draft.info.kind))
    try:
        staging.mkdir()
        chunk_digests = _write_weights(staging / WEIGHTS_NAME, header, draft, reporter)
        draft = draft.concluded()
        for name, content in draft.files.items():
            write_file(staging / name, [content])
        info = dataclasses.replace(
            draft.info,
            digest=content_digest(chunk_digests, draft.files, draft.info.base_digest or ""),
            num_bytes=total,
            files=tuple(sorted(draft.files)),
        )
        manifest = Manifest(FORMAT_VERSION, info, total, CHUNK_BYTES, chunk_digests, entries)
        return commit(root, staging, manifest, reporter)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise storage_full(root, needed, error.strerror or "") from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def commit(root: Path, staging: Path, manifest: Manifest, reporter: Reporter) -> Manifest:
    """Make a staged checkpoint a committed one: manifest last, all synced, one rename."""
    target = root / CHECKPOINTS / manifest.digest
    is_broken = target.exists()
    if is_broken:
        with contextlib.suppress(NearlineError, OSError):
            return verify_checkpoint(target, reporter)
    write_manifest(staging, manifest)
    _sync(staging / MANIFEST_NAME)
    for folder in [staging, *(path for path in staging.rglob("*") if path.is_dir())]:
        _sync(folder)
    broken = root / INCOMING / staging_name("broken")
    if is_broken:
        os.rename(target, broken)  # it failed the check above: ours heals it
    try:
        os.rename(staging, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return read_manifest(target)  # another import of the same content won the race
    finally:
        shutil.rmtree(broken, ignore_errors=True)
    _sync(target.parent)
    return manifest


def _write_weights(path: Path, header: bytes, draft: Draft, reporter: Reporter) -> tuple[str, ...]:
    """Write header and tensors; return the digest of every chunk."""
    total = len(header) + sum(t.num_bytes for t in draft.tensors)
    digests, hasher = [], xxhash.xxh3_128()
    writer = WeightsWriter(path)
    try:
        for block in _weights(header, draft):
            view = memoryview(block).cast("B")
            while len(view):
                part = view[: CHUNK_BYTES - writer.num_bytes % CHUNK_BYTES]
                hasher.update(part)
                writer.write(part)
                if writer.num_bytes % CHUNK_BYTES == 0:
                    digests.append(hasher.hexdigest())
                    hasher = xxhash.xxh3_128()
                view = view[len(part) :]
            reporter.progress("writing", writer.num_bytes, total)
        writer.finish()
    finally:
        writer.close()
    if total % CHUNK_BYTES:
        digests.append(hasher.hexdigest())
    return tuple(digests)


def _weights(header: bytes, draft: Draft) -> Iterator[Block]:
    yield header
    for tensor in draft.tensors:
        done = 0
        for block in tensor.blocks():
            done += memoryview(block).nbytes
            yield block
        if done != tensor.num_bytes:
            raise CheckpointCorrupt(f"tensor {tensor.name!r} gave {done} bytes, expected {tensor.num_bytes}")


def write_file(path: Path, blocks: Iterable[Block]) -> None:
    """Write a new file and sync it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb", buffering=0) as file:
        for block in blocks:
            view = memoryview(block).cast("B")
            while len(view):
                view = view[os.write(file.fileno(), view) :]
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_space(root: Path, needed: Bytes) -> None:
    stats = os.statvfs(root)
    if stats.f_bavail * stats.f_frsize < needed:
        raise storage_full(root, needed, "not enough space")


def storage_full(root: Path, needed: Bytes, reason: str) -> StorageFull:
    """Say how much is needed and how much there is."""
    stats = os.statvfs(root)
    available = stats.f_bavail * stats.f_frsize
    return StorageFull(
        f"{root}: the checkpoint needs {needed} bytes, {available} are available ({reason}); "
        "free space or remove a model, then import again"
    )

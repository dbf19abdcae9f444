"""Commits a model's own safetensors file as it is: a hard link beside a manifest, nothing converted, nothing copied.

It costs no disk and no writing. What the converted format gives is missing: tensors to fuse that are not adjacent are
copied when an instance binds, and layers do not arrive in the order they run.
"""

import dataclasses
import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import xxhash

from nearline.checkpoint_store.convert_types import Draft, Reporter
from nearline.checkpoint_store.incoming import INCOMING, staging_name
from nearline.checkpoint_store.publish import CHECKPOINTS, NO_SPACE, commit, storage_full, write_file
from nearline.checkpoint_store.publish_digest import content_digest
from nearline.checkpoint_store.safetensors_file import StoredTensor, open_safetensors, read_blocks
from nearline.checkpoint_store.safetensors_shards import SINGLE_NAME
from nearline.checkpoint_store.source_directory import SourceDirectory
from nearline.checkpoint_store.types import CHUNK_BYTES, FORMAT_VERSION, WEIGHTS_NAME, Manifest
from nearline.protocol import Bytes
from nearline.protocol.errors import InvalidRequest, UnsupportedCheckpoint

_CURE = "leave --no-convert out"


def publish_linked(root: Path, directory: SourceDirectory, draft: Draft, reporter: Reporter) -> Manifest:
    """Commit the weights file of `directory`, which `draft` has judged, under `root` by a hard link.

    Raises UnsupportedCheckpoint when the file is not what an engine looks for, InvalidRequest when it cannot be linked;
    both say the cure. Whatever it raises, nothing of the attempt stays on disk.
    """
    weights = directory.file(SINGLE_NAME)
    if weights is None:
        raise UnsupportedCheckpoint(f"{directory.path}: weights in shards cannot be served as they are; {_CURE}")
    weights = weights.resolve()  # of a hub snapshot, the blob
    stored = open_safetensors(weights)
    _check_names(draft, stored, weights)
    (root / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    (root / INCOMING).mkdir(exist_ok=True)
    staging = root / INCOMING / staging_name(str(draft.info.kind))
    try:
        staging.mkdir()
        _link(weights, staging / WEIGHTS_NAME, root)
        chunk_digests, num_bytes = _digests(staging / WEIGHTS_NAME, draft, reporter)
        for name, content in draft.files.items():
            write_file(staging / name, [content])
        digest = content_digest(chunk_digests, draft.files)
        files = tuple(sorted(draft.files))
        info = dataclasses.replace(draft.info, digest=digest, num_bytes=num_bytes, files=files)
        entries = tuple(tensor.entry for tensor in stored.values())
        return commit(
            root, staging, Manifest(FORMAT_VERSION, info, num_bytes, CHUNK_BYTES, chunk_digests, entries), reporter
        )
    except OSError as error:
        if error.errno in NO_SPACE:
            raise storage_full(root, sum(map(len, draft.files.values())), error.strerror or "") from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_names(draft: Draft, stored: Mapping[str, StoredTensor], weights: Path) -> None:
    for tensor in draft.tensors:
        found = stored.get(tensor.name)
        if found is None or (found.entry.dtype, found.entry.shape) != (tensor.dtype, tensor.shape):
            raise UnsupportedCheckpoint(
                f"{weights}: tensor {tensor.name!r} is stored under another name or in another form, so the file "
                f"cannot be served as it is; {_CURE}"
            )


def _link(weights: Path, target: Path, root: Path) -> None:
    try:
        os.link(weights, target)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        where = "it lies on another file system" if error.errno == errno.EXDEV else str(error.strerror)
        raise InvalidRequest(
            f"{weights} cannot be linked into {root} ({where}); move the model to the store's file system, or {_CURE}",
            param="source",
        ) from None


def _digests(weights: Path, draft: Draft, reporter: Reporter) -> tuple[tuple[str, ...], Bytes]:
    """Check the tensors as a conversion would, then digest the file chunk by chunk."""
    for tensor in draft.tensors:
        for _ in tensor.blocks():
            pass
    total, done, digests = weights.stat().st_size, 0, []
    for block in read_blocks(weights, 0, total, WEIGHTS_NAME):
        digests.append(xxhash.xxh3_128_hexdigest(block))
        done += len(block)
        reporter.progress("verifying", done, total)
    return tuple(digests), total

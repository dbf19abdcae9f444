"""Copies a committed checkpoint from nodes that have it: chunk by chunk, each checked, going on where it broke off.

A source `peer:DIGEST@URL[,URL…]` names the checkpoint and the HTTP addresses of nodes. The digest is the name of the
weights and of the small files, so no peer needs to be trusted for those: what does not have it is not taken. What the
manifest says besides (context, token ids, family) is not part of the name: an evicted checkpoint goes by the manifest
it has left here, and the controller holds a new copy against what it knows (controller/imports.py).
"""

import contextlib
import os
import queue
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import xxhash

from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.downloads import download_folder
from nearline.checkpoint_store.incoming import INCOMING, staging_name
from nearline.checkpoint_store.peer_nodes import Peers
from nearline.checkpoint_store.publish import CHECKPOINTS, commit, write_file
from nearline.checkpoint_store.publish_digest import content_digest
from nearline.checkpoint_store.safetensors_file import open_safetensors
from nearline.checkpoint_store.types import CHUNK_BYTES, MANIFEST_NAME, WEIGHTS_NAME, Manifest, read_manifest
from nearline.checkpoint_store.weights_file import WeightsFile
from nearline.protocol import Bytes, Digest
from nearline.protocol.errors import CheckpointCorrupt, InvalidRequest

_FORM = re.compile(r"peer:([0-9a-f]{32})@(https?://[^,\s]+(?:,https?://[^,\s]+)*)")
_NUM_PULLERS = 4


def copy_from_peers(root: Path, source: str, reporter: Reporter) -> Manifest:
    """Bring the checkpoint under `root/checkpoints`; interrupted, the next copy of it fetches only what is missing.

    Raises InvalidRequest for a source of another form, NotFound when no peer has it, SourceUnavailable when none
    answers any more, CheckpointCorrupt when what they give is not the checkpoint, StorageFull.
    """
    match = _FORM.fullmatch(source)
    if match is None:
        raise InvalidRequest(f"{source[:200]}: write peer:DIGEST@URL[,URL…]", param="source")
    digest, peers = Digest(match[1]), Peers(Digest(match[1]), match[2].split(","))
    with download_folder(source, root) as folder:
        manifest, files = _described(peers, digest, folder, root / CHECKPOINTS / digest)
        reporter.make_room(manifest.num_bytes + sum(map(len, files.values())))
        _fetch_weights(peers, manifest, folder / WEIGHTS_NAME, reporter)
        return _commit(root, folder / WEIGHTS_NAME, manifest, files, reporter)


def _described(peers: Peers, digest: Digest, folder: Path, here: Path) -> tuple[Manifest, dict[str, bytes]]:
    """Fetch manifest and small files, and hold them against the name of the checkpoint."""
    (folder / MANIFEST_NAME).write_bytes(peers.meet())
    manifest = read_manifest(folder)
    if manifest.chunk_bytes > CHUNK_BYTES:
        raise CheckpointCorrupt(
            f"the peer's manifest of {digest} has chunks of {manifest.chunk_bytes} bytes, at most {CHUNK_BYTES} are "
            "taken; verify the model there"
        )
    names = [PurePosixPath(name) for name in manifest.info.files]
    if any(name.is_absolute() or ".." in name.parts or str(name) in (WEIGHTS_NAME, MANIFEST_NAME) for name in names):
        raise CheckpointCorrupt(f"the peer's manifest of {digest} names files outside of the checkpoint; not copied")
    files = {name: peers.small_file(name) for name in manifest.info.files}
    found = content_digest(manifest.chunk_digests, files, manifest.info.base_digest or "")
    if not found == manifest.digest == digest:
        raise CheckpointCorrupt(f"what the peer calls {digest} has digest {found}; verify the model there")
    with contextlib.suppress(CheckpointCorrupt):  # nothing of it is left here
        left = read_manifest(here)
        if (left.digest, left.chunk_digests, left.info.files) == (digest, manifest.chunk_digests, manifest.info.files):
            return left, files
    return manifest, files


def _fetch_weights(peers: Peers, manifest: Manifest, path: Path, reporter: Reporter) -> None:
    with path.open("ab"):
        os.truncate(path, manifest.num_bytes)
    missing: queue.SimpleQueue[int] = queue.SimpleQueue()
    done = 0
    for index, is_here in enumerate(_chunks_here(path, manifest)):
        if is_here:
            done += _size(manifest, index)
        else:
            missing.put(index)
    arrived: queue.SimpleQueue[Bytes | None] = queue.SimpleQueue()
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    threads = ThreadPoolExecutor(_NUM_PULLERS, thread_name_prefix="nearline-peer")
    try:
        num_missing = missing.qsize()
        pullers = [threads.submit(_pull, peers, manifest, descriptor, missing, arrived) for _ in range(_NUM_PULLERS)]
        for _ in range(num_missing):
            num_bytes = arrived.get()
            if num_bytes is None:
                break
            done += num_bytes
            reporter.progress("copying", done, manifest.num_bytes)
        for puller in pullers:
            puller.result()
        os.fsync(descriptor)
    finally:
        _drop(missing)
        threads.shutdown()
        os.close(descriptor)


def _pull(
    peers: Peers, manifest: Manifest, descriptor: int, missing: "queue.SimpleQueue[int]",
    arrived: "queue.SimpleQueue[Bytes | None]",
) -> None:  # fmt: skip
    """Fetch chunks until none is missing. Each is told to `arrived`, or None when it fails: its error is its result."""
    try:
        buffer = memoryview(bytearray(manifest.chunk_bytes))
        while True:
            try:
                index = missing.get_nowait()
            except queue.Empty:
                return
            view = buffer[: _size(manifest, index)]
            peers.chunk(index, view, manifest.chunk_digests[index])
            written = 0
            while written < len(view):
                written += os.pwrite(descriptor, view[written:], index * manifest.chunk_bytes + written)
            arrived.put(len(view))
    except BaseException:
        _drop(missing)  # the others need not go on
        arrived.put(None)
        raise


def _drop(missing: "queue.SimpleQueue[int]") -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            missing.get_nowait()


def _chunks_here(path: Path, manifest: Manifest) -> list[bool]:
    """Which chunks an earlier copy has left, by their digests: nothing else proves it after a crash."""
    if path.stat().st_blocks == 0:
        return [False] * len(manifest.chunk_digests)
    file, buffer = WeightsFile(path, manifest.num_bytes), memoryview(bytearray(manifest.chunk_bytes))
    try:
        found = []
        for index, digest in enumerate(manifest.chunk_digests):
            view = buffer[: _size(manifest, index)]
            file.read_into(view, index * manifest.chunk_bytes)
            found.append(xxhash.xxh3_128_hexdigest(view) == digest)
        return found
    finally:
        file.close()


def _commit(root: Path, weights: Path, manifest: Manifest, files: dict[str, bytes], reporter: Reporter) -> Manifest:
    if tuple(stored.entry for stored in open_safetensors(weights).values()) != manifest.tensors:
        raise CheckpointCorrupt(f"the peer's manifest of {manifest.digest} does not describe its weights; not copied")
    for name in (CHECKPOINTS, INCOMING):
        (root / name).mkdir(exist_ok=True)
    staging = root / INCOMING / staging_name(str(manifest.info.kind))
    staging.mkdir()
    try:
        os.rename(weights, staging / WEIGHTS_NAME)
        for name, content in files.items():
            write_file(staging / name, [content])
        return commit(root, staging, manifest, reporter)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _size(manifest: Manifest, index: int) -> Bytes:
    return min(manifest.chunk_bytes, manifest.num_bytes - index * manifest.chunk_bytes)

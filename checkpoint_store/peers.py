"""Copies a committed checkpoint from nodes that have it: chunk by chunk, each checked, going on where it broke off.

A source `peer:DIGEST@URL[,URL…]` names the checkpoint and the HTTP addresses of nodes. The digest is the name of the
content, so no peer needs to be trusted: what does not have it is not taken.
"""

import http.client
import os
import queue
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import xxhash

from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.downloads import download_folder
from nearline.checkpoint_store.incoming import INCOMING, staging_name
from nearline.checkpoint_store.publish import CHECKPOINTS, commit, write_file
from nearline.checkpoint_store.publish_digest import content_digest
from nearline.checkpoint_store.safetensors_file import open_safetensors
from nearline.checkpoint_store.types import MANIFEST_NAME, WEIGHTS_NAME, Manifest, read_manifest
from nearline.checkpoint_store.weights_file import WeightsFile
from nearline.protocol import PEER, TOKEN_VARIABLE, Bytes, Digest, Seconds
from nearline.protocol.errors import CheckpointCorrupt, InvalidRequest, NotFound, SourceUnavailable

_FORM = re.compile(r"peer:([0-9a-f]{32})@(https?://[^,\s]+(?:,https?://[^,\s]+)*)")
_NUM_PULLERS = 4
_NUM_ROUNDS = 4
"""How often every peer is asked for a piece before the copy is given up; a later one goes on from there."""
_RETRY_S: Seconds = 0.3
_TIMEOUT_S: Seconds = 20.0
_MAX_SMALL_BYTES: Bytes = 64 << 20
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def copy_from_peers(root: Path, source: str, reporter: Reporter) -> Manifest:
    """Bring the checkpoint under `root/checkpoints`; interrupted, the next copy of it fetches only what is missing.

    Raises InvalidRequest for a source of another form, NotFound when no peer has it, SourceUnavailable when none
    answers any more, CheckpointCorrupt when what they give is not the checkpoint, StorageFull.
    """
    match = _FORM.fullmatch(source)
    if match is None:
        raise InvalidRequest(f"{source[:200]}: write peer:DIGEST@URL[,URL…]", param="source")
    digest, peers = Digest(match[1]), Peers(Digest(match[1]), match[2].split(","))
    with download_folder(f"{PEER}{digest}", root) as folder:
        manifest, files = _described(peers, digest, folder)
        reporter.make_room(manifest.num_bytes + sum(map(len, files.values())))
        _fetch_weights(peers, manifest, folder / WEIGHTS_NAME, reporter)
        return _commit(root, folder / WEIGHTS_NAME, manifest, files, reporter)


class Peers:
    """Nodes that are said to have one checkpoint, asked in turn. Safe to use from several threads."""

    def __init__(self, digest: Digest, urls: Sequence[str]) -> None:
        self._base = f"checkpoints/{digest}"
        self._urls = list(urls)
        token = os.environ.get(TOKEN_VARIABLE)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def small_file(self, name: str) -> bytes:
        """Fetch a text file whole."""
        return bytes(self._ask(f"files/{urllib.parse.quote(name)}", memoryview(bytearray(_MAX_SMALL_BYTES)), 0))

    def chunk(self, index: int, view: memoryview, digest: str) -> None:
        """Fetch one chunk into `view`, which is as long, from whichever peer gives the right bytes."""
        for turn in range(len(self._urls)):
            got = self._ask(f"chunks/{index}", view, index + turn)
            if len(got) == len(view) and xxhash.xxh3_128_hexdigest(got) == digest:
                return
        raise CheckpointCorrupt(
            f"chunk {index} of {self._base} does not have its digest {digest} on any of {', '.join(self._urls)}; "
            "verify the model there"
        )

    def _ask(self, path: str, view: memoryview, first: int) -> memoryview:
        """Ask peers in turn, from the one of number `first` on, going on within a broken answer."""
        reason, num_missing = "", 0
        for attempt in range(_NUM_ROUNDS * len(self._urls)):
            url = f"{self._urls[(first + attempt) % len(self._urls)].rstrip('/')}/{self._base}/{path}"
            try:
                return view[: self._receive(url, view)]
            except urllib.error.HTTPError as error:
                error.close()
                reason = f"{url}: the node answers {error.code}"
                num_missing += error.code == 404
            except (OSError, http.client.HTTPException) as error:
                reason = f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}"
            if (attempt + 1) % len(self._urls) == 0:
                if num_missing == len(self._urls):
                    raise NotFound(f"no peer has {self._base} ({reason}); import it from its source")
                num_missing = 0
                time.sleep(_RETRY_S)
        raise SourceUnavailable(f"no peer gives {path} of {self._base}: {reason}; what is here is kept, copy again")

    def _receive(self, url: str, view: memoryview) -> Bytes:
        done, total = 0, len(view)
        while True:
            headers = self._headers | ({"Range": f"bytes={done}-"} if done else {})
            before = done
            try:
                with _OPENER.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S) as answer:
                    total = done + int(answer.headers["Content-Length"])
                    if total > len(view):
                        raise http.client.HTTPException(f"it gives {total} bytes where {len(view)} were expected")
                    while got := answer.readinto(view[done:total]):
                        done += got
            except (OSError, http.client.HTTPException):
                if done == before:
                    raise
            if done == total:
                return done
            if done == before:
                raise http.client.IncompleteRead(b"", total - done)


def _described(peers: Peers, digest: Digest, folder: Path) -> tuple[Manifest, dict[str, bytes]]:
    """Fetch manifest and small files, and hold them against the name of the checkpoint."""
    (folder / MANIFEST_NAME).write_bytes(peers.small_file(MANIFEST_NAME))
    manifest = read_manifest(folder)
    names = [PurePosixPath(name) for name in manifest.info.files]
    if any(name.is_absolute() or ".." in name.parts or str(name) in (WEIGHTS_NAME, MANIFEST_NAME) for name in names):
        raise CheckpointCorrupt(f"the peer's manifest of {digest} names files outside of the checkpoint; not copied")
    files = {name: peers.small_file(name) for name in manifest.info.files}
    found = content_digest(manifest.chunk_digests, files, manifest.info.base_digest or "")
    if not found == manifest.digest == digest:
        raise CheckpointCorrupt(f"what the peer calls {digest} has digest {found}; verify the model there")
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
    arrived: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    threads = ThreadPoolExecutor(_NUM_PULLERS, thread_name_prefix="nearline-peer")
    try:
        num_missing = missing.qsize()
        pullers = [threads.submit(_pull, peers, manifest, descriptor, missing, arrived) for _ in range(_NUM_PULLERS)]
        for _ in range(num_missing):
            while arrived.empty() and not any(p.done() and p.exception() for p in pullers):
                time.sleep(0.002)
            if arrived.empty():
                break
            done += arrived.get()
            reporter.progress("copying", done, manifest.num_bytes)
        for puller in pullers:
            puller.result()
        os.fsync(descriptor)
    finally:
        while not missing.empty():
            missing.get()
        threads.shutdown()
        os.close(descriptor)


def _pull(
    peers: Peers, manifest: Manifest, descriptor: int, missing: "queue.SimpleQueue[int]",
    arrived: "queue.SimpleQueue[Bytes]",
) -> None:  # fmt: skip
    buffer = memoryview(bytearray(manifest.chunk_bytes))
    while True:
        try:
            index = missing.get_nowait()
        except queue.Empty:
            return
        view = buffer[: _size(manifest, index)]
        try:
            peers.chunk(index, view, manifest.chunk_digests[index])
        except BaseException:
            while not missing.empty():  # the others need not go on
                missing.get()
            raise
        written = 0
        while written < len(view):
            written += os.pwrite(descriptor, view[written:], index * manifest.chunk_bytes + written)
        arrived.put(len(view))


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

"""Chunks from peers: what is right is taken, what is wrong or torn is not, what is here is not fetched again."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nearline.checkpoint_store import Manifest, peer_nodes
from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.peers import copy_from_peers
from nearline.checkpoint_store.types import CHUNK_BYTES, read_manifest, write_manifest
from nearline.protocol import peer_source
from nearline.protocol.errors import CheckpointCorrupt, InvalidRequest, NotFound, SourceUnavailable, StorageFull


@dataclass
class Peer:
    """A node's HTTP routes over one checkpoint directory, and how it misbehaves: `spoil(index, body) -> body`."""

    directory: Path
    manifest: Manifest
    spoil: Callable[[int, bytes], bytes] = lambda index, body: body
    cuts: list[int] = field(default_factory=list)
    asked: list[tuple[int, str | None]] = field(default_factory=list)
    url: str = ""

    def body(self, path: str, header: str | None) -> bytes | None:
        _, _, digest, kind, name = path.split("/", 4)
        if digest != self.manifest.digest:
            return None
        if kind == "files":
            return (self.directory / name).read_bytes()
        index, size = int(name), self.manifest.chunk_bytes
        self.asked.append((index, header))
        return self.spoil(index, (self.directory / "model.safetensors").read_bytes()[index * size : (index + 1) * size])


@pytest.fixture
def serve(root: Path, checkpoints: ModuleType) -> Iterator[Callable[..., Peer]]:
    """Start a peer that has a checkpoint of 9 chunks."""
    manifest = checkpoints.commit_random(root / "peer", 9, seed=5)
    servers: list[ThreadingHTTPServer] = []

    def start(**misbehaviour: Any) -> Peer:
        peer = Peer(root / "peer" / manifest.digest, manifest, **misbehaviour)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                header = self.headers.get("Range")
                body = peer.body(self.path, header)
                if body is None:
                    return self.send_error(404)
                body = body[int(header[6:-1]) if header else 0 :]
                self.send_response(206 if header else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: peer.cuts.pop() if "chunks" in self.path and peer.cuts else None])
                return None

            def log_message(self, *_: object) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        peer.url = f"http://127.0.0.1:{servers[-1].server_port}"
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return peer

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_nodes, "_RETRY_S", 0.01)


def copy(root: Path, peer: Peer, *more: Peer, reporter: Reporter | None = None) -> Manifest:
    source = peer_source(peer.manifest.digest, [one.url for one in (peer, *more)])
    return copy_from_peers(root, source, reporter or Reporter())


def weights(root: Path, peer: Peer) -> bytes:
    return (root / "checkpoints" / peer.manifest.digest / "model.safetensors").read_bytes()


def test_all_chunks_come_in_some_order_and_the_checkpoint_is_committed(root: Path, serve: Callable[..., Peer]) -> None:
    first, second = serve(), serve()
    seen: list[tuple[str, int, int]] = []
    manifest = copy(root, first, second, reporter=Reporter(progress=lambda *what: seen.append(what)))
    assert manifest == first.manifest
    assert weights(root, first) == (first.directory / "model.safetensors").read_bytes()
    assert sorted(index for index, _ in first.asked + second.asked) == list(range(9)), "each chunk once"
    assert first.asked, "both peers carry the load"
    assert second.asked
    assert seen[-1] == ("copying", manifest.num_bytes, manifest.num_bytes)
    assert list((root / "downloads").iterdir()) == list((root / "incoming").iterdir()) == []


def test_an_answer_that_breaks_off_goes_on_where_it_broke(root: Path, serve: Callable[..., Peer]) -> None:
    peer = serve(cuts=[5000])
    copy(root, peer)
    assert sum(header == "bytes=5000-" for _, header in peer.asked) == 1
    assert weights(root, peer) == (peer.directory / "model.safetensors").read_bytes()


def test_a_flipped_bit_is_fetched_from_another_peer_and_with_no_other_refused(
    root: Path, serve: Callable[..., Peer]
) -> None:
    liar = serve(spoil=lambda index, body: bytes([body[0] ^ 1]) + body[1:] if index == 4 else body)
    with pytest.raises(CheckpointCorrupt, match=r"chunk 4 of .* does not have its digest"):
        copy(root, liar)
    assert not (root / "checkpoints" / liar.manifest.digest).exists()
    copy(root, liar, serve())
    assert weights(root, liar) == (liar.directory / "model.safetensors").read_bytes()


def test_a_copy_that_broke_off_fetches_only_what_is_missing(root: Path, serve: Callable[..., Peer]) -> None:
    def dies(index: int, body: bytes) -> bytes:
        if index >= 6:
            raise ConnectionAbortedError
        return body

    peer = serve(spoil=dies)
    with pytest.raises(SourceUnavailable, match="what is here is kept, copy again"):
        copy(root, peer)
    other = serve()
    copy(root, other)
    assert sorted(index for index, _ in other.asked) == [6, 7, 8]
    assert weights(root, peer) == (peer.directory / "model.safetensors").read_bytes()


def test_a_disk_that_fails_meanwhile_ends_the_copy(
    root: Path, serve: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = serve()

    def pwrite(*_: object) -> int:
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="the disk fails"):
        copy(root, peer)


def test_a_part_that_rotted_meanwhile_is_fetched_again(root: Path, serve: Callable[..., Peer]) -> None:
    peer = serve(spoil=lambda index, body: b"" if index == 8 else body)
    with pytest.raises(CheckpointCorrupt):
        copy(root, peer)
    other = serve(spoil=lambda index, body: body if index else b"")
    with pytest.raises(CheckpointCorrupt, match="chunk 0"):
        copy(root, other)
    assert not list((root / "downloads").iterdir()), "nothing of what a wrong peer gave is kept"


def test_what_no_peer_has_and_what_names_no_peer_is_said(root: Path, serve: Callable[..., Peer]) -> None:
    peer = serve()
    with pytest.raises(NotFound, match=r"no peer has checkpoints/0+ "):
        copy_from_peers(root, f"peer:{'0' * 32}@{peer.url}", Reporter())
    with pytest.raises(InvalidRequest, match="write peer:DIGEST@URL"):
        copy_from_peers(root, "peer:abc", Reporter())


def test_small_files_and_manifest_must_be_those_of_the_name(root: Path, serve: Callable[..., Peer]) -> None:
    peer = serve()
    path = peer.directory / "manifest.json"
    path.write_text(path.read_text().replace(peer.manifest.chunk_digests[2], "0" * 32))
    with pytest.raises(CheckpointCorrupt, match="what the peer calls"):
        copy(root, peer)
    path.write_text(path.read_text().replace('"files": []', '"files": ["../../x"]'))
    with pytest.raises(CheckpointCorrupt, match="names files outside"):
        copy(root, peer)
    assert peer.asked == []


def test_what_is_left_of_an_evicted_checkpoint_describes_it_whatever_a_peer_says(
    root: Path, serve: Callable[..., Peer]
) -> None:
    peer = serve()
    left = root / "checkpoints" / peer.manifest.digest
    left.mkdir(parents=True)
    write_manifest(left, peer.manifest)
    lie = replace(peer.manifest.info, eos_token_ids=(5,), source="https://elsewhere")
    write_manifest(peer.directory, replace(peer.manifest, info=lie))
    assert copy(root, peer) == peer.manifest
    assert read_manifest(left) == peer.manifest


def test_chunks_larger_than_any_of_ours_are_not_made_room_for(root: Path, serve: Callable[..., Peer]) -> None:
    peer = serve()
    write_manifest(peer.directory, replace(peer.manifest, num_bytes=1 << 50, chunk_bytes=(1 << 50) // 9 + 1))
    with pytest.raises(CheckpointCorrupt, match=f"at most {CHUNK_BYTES} are taken"):
        copy(root, peer)


def test_a_full_disk_is_said_before_anything_is_fetched(root: Path, serve: Callable[..., Peer]) -> None:
    def refuse(num_bytes: int) -> None:
        raise StorageFull(f"no {num_bytes} bytes")

    peer = serve()
    with pytest.raises(StorageFull):
        copy(root, peer, reporter=Reporter(make_room=refuse))
    assert peer.asked == []

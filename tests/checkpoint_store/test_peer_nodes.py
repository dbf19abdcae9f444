"""Whom a copy asks: the dead once, the living in turn, and nobody whom it was not told of."""

import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nearline.checkpoint_store import peer_nodes
from nearline.checkpoint_store.peer_nodes import Peers
from nearline.protocol import TOKEN_VARIABLE, Digest
from nearline.protocol.errors import NotFound, SourceUnavailable

DIGEST = Digest("d" * 32)


class Node:
    """Answers with a status, a header and its name; keeps (path, token) of what it was asked."""

    def __init__(self, body: bytes = b"live", status: int = 200, location: str = "") -> None:
        self.asked: list[tuple[str, str | None]] = []
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                node.asked.append((self.path, self.headers.get("Authorization")))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if location:
                    self.send_header("Location", location)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def node() -> Iterator[Node]:
    found = Node()
    yield found
    found.close()


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A node that takes connections and says nothing, as one does whose process hangs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def url_of(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def num_connections(server: socket.socket) -> int:
    count = 0
    while True:
        try:
            server.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def test_small_files_take_the_memory_they_need_however_many_peers_there_are(node: Node) -> None:
    peers = Peers(DIGEST, [f"{node.url}/node-{number}" for number in range(16)])
    tracemalloc.start()
    try:
        assert (peers.meet(), peers.small_file("config.json")) == (b"live", b"live")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_small_file_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, node: Node) -> None:
    monkeypatch.setattr(peer_nodes, "_MAX_SMALL_BYTES", 3)
    monkeypatch.setattr(peer_nodes, "_RETRY_S", 0.0)
    with pytest.raises(SourceUnavailable, match="4 bytes where 3 were expected"):
        Peers(DIGEST, [node.url]).small_file("config.json")


def refusing() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return url_of(server)


def test_the_dead_do_not_keep_the_living_waiting_and_are_not_asked_again(
    node: Node, silent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_nodes, "_MEET_S", 60.0)
    monkeypatch.setattr(peer_nodes, "_SILENCE_S", 60.0)
    peers = Peers(DIGEST, [refusing(), url_of(silent), node.url])
    begun_at = time.monotonic()
    assert peers.meet() == b"live"
    assert [peers.small_file(f"{i}.json") for i in range(4)] == [b"live"] * 4
    assert time.monotonic() - begun_at < 20
    assert num_connections(silent) == 1


def test_when_nobody_answers_that_is_said_in_seconds(silent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer_nodes._MEET_S <= 5
    monkeypatch.setattr(peer_nodes, "_MEET_S", 2.0)
    dead, mute = refusing(), url_of(silent)
    with pytest.raises(SourceUnavailable, match="copy again") as raised:
        Peers(DIGEST, [dead, mute]).meet()
    assert f"{dead}: [Errno 111]" in raised.value.message
    assert f"{mute}: no answer" in raised.value.message
    missing = Node(status=404)
    with pytest.raises(NotFound, match="import it from its source"):
        Peers(DIGEST, [missing.url]).meet()
    missing.close()


def test_who_falls_silent_within_a_copy_costs_one_silence(
    node: Node, silent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_nodes, "_SILENCE_S", 2.0)
    peers = Peers(DIGEST, [url_of(silent), node.url])
    assert [peers.small_file(f"{i}.json") for i in range(4)] == [b"live"] * 4
    assert num_connections(silent) == 1
    alone = Peers(DIGEST, [url_of(silent)])
    for _ in range(2):
        with pytest.raises(SourceUnavailable, match="timed out"):
            alone.small_file("x")
    assert num_connections(silent) == 1


@pytest.mark.parametrize("status", [301, 302, 307])
def test_the_token_goes_to_the_nodes_that_were_named_and_is_not_sent_on(
    node: Node, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    astray = Node(status=status, location=f"{node.url}/elsewhere")
    with pytest.raises(SourceUnavailable, match=f"the node answers {status}"):
        Peers(DIGEST, [astray.url]).meet()
    assert astray.asked == [(f"/checkpoints/{DIGEST}/files/manifest.json", "Bearer secret")]
    assert node.asked == []
    astray.close()

"""Frames over a socket pair: cut anywhere, in any number, against a peer that may not read."""

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from nearline.engine.link import MAX_FRAME_BYTES, AgentLink, LinkClosed
from nearline.protocol import FinishReason, InstanceId, RequestId, SequenceUpdate, WireError, encode
from nearline.protocol.frames import Abort, PoolLayout, StepDone, Unbind


@pytest.fixture
def pair() -> Iterator[tuple[AgentLink, socket.socket]]:
    ours, theirs = socket.socketpair()
    link = AgentLink(ours)
    yield link, theirs
    link.close()
    theirs.close()


def frame(message: object) -> bytes:
    body = encode(message)
    return struct.pack("<I", len(body)) + body


def test_messages_arrive_whole_and_in_order_however_the_bytes_are_cut(pair: tuple[AgentLink, socket.socket]) -> None:
    link, agent = pair
    messages = [PoolLayout(3, 4096), Unbind(), *[Abort(InstanceId("i"), RequestId(f"r{n}")) for n in range(5)]]
    data = b"".join(frame(message) for message in messages)
    for size in (1, 3, 7, len(data)):
        received = []
        for start in range(0, len(data), size):
            agent.sendall(data[start : start + size])
            received += link.receive(0.0)
        assert received == messages


def test_without_messages_it_returns_at_once_or_waits_to_be_woken(pair: tuple[AgentLink, socket.socket]) -> None:
    link, _ = pair
    assert link.receive(0.0) == []
    started_at = time.monotonic()
    threading.Timer(0.05, link.wake).start()
    assert link.receive(None) == []
    assert 0.04 < time.monotonic() - started_at < 60
    assert link.receive(0.0) == []


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", MAX_FRAME_BYTES + 1),
        b"\x03\x00\x00\x00abc",
        frame(StepDone((), 0, 0, 0)),  # the engine's own message, not the agent's
        b"\x05\x00\x00\x00\x92\xa2Hi\xc0",
    ],
)
def test_what_the_agent_does_not_speak_is_an_error(pair: tuple[AgentLink, socket.socket], data: bytes) -> None:
    link, agent = pair
    agent.sendall(data)
    with pytest.raises(WireError):
        link.receive(0.0)


def test_a_closed_socket_is_noticed_when_receiving_and_when_sending(pair: tuple[AgentLink, socket.socket]) -> None:
    link, agent = pair
    agent.sendall(frame(Unbind())[:-1])
    agent.close()
    assert link.receive(None) == [], "half a message is no message"
    with pytest.raises(LinkClosed):
        link.receive(None)
    with pytest.raises(LinkClosed):
        link.send(Unbind())


def test_it_goes_on_reading_while_the_agent_does_not_read(pair: tuple[AgentLink, socket.socket]) -> None:
    """Both sides write megabytes before they read: with plain blocking writes neither would ever end."""
    link, agent = pair
    update = SequenceUpdate(RequestId("r"), 1, tuple(range(100_000)), FinishReason.LENGTH)
    big, many = StepDone((update,) * 20, 0, 0, 0), [Abort(InstanceId("i"), RequestId("x" * 1000))] * 3000

    def converse() -> None:
        agent.sendall(b"".join(frame(message) for message in many))
        agent.settimeout(60)
        expected = len(frame(big))
        while expected > 0:
            expected -= len(agent.recv(1 << 20))

    thread = threading.Thread(target=converse)
    thread.start()
    link.send(big)
    received: list[object] = []
    while len(received) < len(many):
        received += link.receive(60.0)
    thread.join(60)
    assert received == many

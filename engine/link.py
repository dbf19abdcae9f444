"""The engine's end of the socket to its node agent: length-prefixed frames, never blocking unless asked to.

A frame is 4 bytes little-endian length, then the encoded message. Sending waits until the agent has read enough,
and keeps reading meanwhile, so two sides that both have much to say cannot wait for each other for ever.
"""

import os
import select
import socket
import struct

from nearline.protocol import MessageCodec, Seconds, WireError, encode
from nearline.protocol.frames import ToEngine

MAX_FRAME_BYTES = 64 * 1024 * 1024
_MAX_UNREAD_BYTES = 2 * MAX_FRAME_BYTES
_RECEIVE_BYTES = 64 * 1024
_LENGTH = struct.Struct("<I")


class LinkClosed(Exception):
    """The agent has closed its end: the engine's work is over."""


class AgentLink:
    """Owns the socket. One thread uses it; `wake` may be called from any."""

    def __init__(self, agent: socket.socket) -> None:
        agent.setblocking(False)
        self._socket = agent
        self._codec = MessageCodec(ToEngine)
        self._unread = bytearray()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inbound = select.poll()
        self._inbound.register(agent, select.POLLIN)
        self._inbound.register(self._wakeup, select.POLLIN)

    def receive(self, timeout_s: Seconds | None) -> list[ToEngine]:
        """Return the messages that are there; with none, wait for one, for a `wake` or for the time to pass.

        Raises LinkClosed, WireError for bytes that are not our protocol.
        """
        messages = self._decode()
        if messages:
            timeout_s = 0.0
        ready = {fd for fd, _ in self._inbound.poll(None if timeout_s is None else 1000 * timeout_s)}
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        if self._socket.fileno() in ready:
            while len(self._unread) < _MAX_UNREAD_BYTES and self._fill():
                pass
        return messages + self._decode()

    def send(self, message: object) -> None:
        """Send one message, waiting for the agent if it reads slowly. Raises LinkClosed."""
        body = encode(message)
        unsent = memoryview(_LENGTH.pack(len(body)) + body)
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._await_room()
            except OSError as error:
                raise LinkClosed(f"cannot send: {error}") from None

    def wake(self) -> None:
        """Make a waiting `receive` return."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        os.close(self._wakeup)

    def _await_room(self) -> None:
        """Wait until the socket takes more, reading what comes in between."""
        may_read = len(self._unread) < _MAX_UNREAD_BYTES
        both = select.poll()
        both.register(self._socket, select.POLLOUT | (select.POLLIN if may_read else 0))
        ((_, events),) = both.poll()
        if events & select.POLLIN:
            self._fill()

    def _fill(self) -> bool:
        """Read once. Returns whether there may be more."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise LinkClosed(f"cannot receive: {error}") from None
        if not data:
            raise LinkClosed("the node agent closed the socket")
        self._unread += data
        return len(data) == _RECEIVE_BYTES

    def _decode(self) -> list[ToEngine]:
        """Cut whole frames off what was read."""
        messages: list[ToEngine] = []
        start = 0
        while len(self._unread) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread, start)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            end = start + _LENGTH.size + length
            if len(self._unread) < end:
                break
            messages.append(self._codec.decode(bytes(self._unread[start + _LENGTH.size : end])))
            start = end
        del self._unread[:start]
        return messages

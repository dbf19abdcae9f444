"""A real engine process on a socket pair, its DRAM pool a memfd that the test fills: the node agent's side by hand."""

import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from nearline.checkpoint_store import FRAME_READY, WEIGHTS_NAME, read_manifest
from nearline.protocol import (
    Digest,
    InstanceId,
    InstanceSpec,
    MessageCodec,
    ModelId,
    Request,
    RequestId,
    SequenceUpdate,
    encode,
)
from nearline.protocol.frames import (
    Bind,
    BindFailed,
    Bound,
    EngineReady,
    FromEngine,
    PoolLayout,
    StepDone,
    Submit,
    Unbind,
    Unbound,
)

WAIT_S = 60.0
"""Only ends a hang."""
FRAME_BYTES, NUM_FRAMES = 16 * 1024 * 1024, 4
INSTANCE = InstanceId("m/1")


class Pool:
    """Frames and ready bytes as the node agent keeps them; frames are handed out one after another."""

    def __init__(self, num_frames: int = NUM_FRAMES) -> None:
        self.fd, self.ready_fd = os.memfd_create("pool"), os.memfd_create("ready")
        os.ftruncate(self.fd, num_frames * FRAME_BYTES)
        os.ftruncate(self.ready_fd, num_frames)
        self._num_frames = num_frames
        self._next = 0

    def take(self, directory: Path) -> tuple[int, ...]:
        count = len(read_manifest(directory).chunk_digests)
        frames = tuple((self._next + i) % self._num_frames for i in range(count))
        self._next += count
        for frame in frames:
            self.mark(frame, 0)
            os.pwrite(self.fd, bytes(FRAME_BYTES), frame * FRAME_BYTES)
        return frames

    def fill(self, directory: Path, frames: tuple[int, ...]) -> None:
        data = (directory / WEIGHTS_NAME).read_bytes()
        for index, frame in enumerate(frames):
            os.pwrite(self.fd, data[index * FRAME_BYTES : (index + 1) * FRAME_BYTES], frame * FRAME_BYTES)
            self.mark(frame, FRAME_READY)

    def mark(self, frame: int, state: int) -> None:
        os.pwrite(self.ready_fd, bytes([state]), frame)


class EngineUnderTest:
    """One process. `inbox` keeps every message it has sent; helpers wait for the one they need."""

    PROGRAM: ClassVar[Sequence[str]] = ("-m", "nearline.engine")

    def __init__(self, *arguments: str) -> None:
        self.pool = Pool()
        self.ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), self.pool.fd, self.pool.ready_fd)
        names = ("--socket-fd", "--pool-fd", "--ready-fd")
        command = [sys.executable, *self.PROGRAM, "--device", "cpu", *arguments]
        command += [text for name, fd in zip(names, fds, strict=True) for text in (name, str(fd))]
        quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self.process = subprocess.Popen(command, pass_fds=fds, env=os.environ | quiet, stderr=subprocess.PIPE)
        theirs.close()
        self.inbox: list[Any] = []
        self._unread = b""
        self._codec = MessageCodec(FromEngine)
        self.send(PoolLayout(NUM_FRAMES, FRAME_BYTES))
        self.expect(EngineReady, timeout_s=2 * WAIT_S)

    def send(self, *messages: Any) -> None:
        self.send_raw(b"".join(struct.pack("<I", len(body)) + body for body in map(encode, messages)))

    def send_raw(self, data: bytes) -> None:
        self.ours.sendall(data)

    def expect(
        self, kind: type | tuple[type, ...], timeout_s: float = WAIT_S, where: Callable[[Any], bool] = lambda _: True
    ) -> Any:
        """Return the next message of a kind; those before it are kept in `inbox`."""
        deadline, seen = time.monotonic() + timeout_s, len(self.inbox)
        while True:
            for message in self.inbox[seen:]:
                seen += 1
                if isinstance(message, kind) and where(message):
                    return message
            self._read(deadline)

    def bind(self, directory: Path, is_filled: bool = True, kv_bytes: int = 1 << 20) -> Bound:
        answer = self.try_bind(directory, is_filled, kv_bytes)
        assert isinstance(answer, Bound), answer
        return answer

    def try_bind(self, directory: Path, is_filled: bool = True, kv_bytes: int = 1 << 20) -> Bound | BindFailed:
        self.frames = self.pool.take(directory)
        if is_filled:
            self.pool.fill(directory, self.frames)
        spec = InstanceSpec(INSTANCE, ModelId("m"), Digest(directory.name))
        self.send(Bind(spec, str(directory / "manifest.json"), self.frames, kv_bytes, 8, 1))
        answer: Bound | BindFailed = self.expect((Bound, BindFailed))
        return answer

    def unbind(self) -> None:
        self.send(Unbind())
        self.expect(Unbound)

    def submit(self, *requests: Request, attempt: int = 1, generated: tuple[int, ...] = ()) -> None:
        self.send(*[Submit(INSTANCE, request, attempt, generated) for request in requests])

    def updates(self, request_id: str) -> list[SequenceUpdate]:
        steps = [message for message in self.inbox if isinstance(message, StepDone)]
        return [update for step in steps for update in step.updates if update.request_id == request_id]

    def outcome(self, request_id: str, timeout_s: float = WAIT_S) -> tuple[list[int], SequenceUpdate]:
        """Wait for the end of a request; return its tokens and its last update."""
        deadline = time.monotonic() + timeout_s
        while not (updates := self.updates(request_id)) or updates[-1].finish_reason is None:
            self._read(deadline)
        return [token for update in updates for token in update.token_ids], updates[-1]

    def generate(self, *requests: Request) -> list[list[int]]:
        self.submit(*requests)
        return [self.outcome(RequestId(request.request_id))[0] for request in requests]

    def exit_code(self, timeout_s: float = WAIT_S) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> str:
        """End the process and return what it logged."""
        self.ours.close()
        try:
            _, logged = self.process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, logged = self.process.communicate()
        os.close(self.pool.fd)
        os.close(self.pool.ready_fd)
        return logged.decode()

    def _read(self, deadline: float) -> None:
        ready, _, _ = select.select([self.ours], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"the engine said nothing more; it has said {self.inbox[-3:]}"
        data = self.ours.recv(1 << 20)
        assert data, f"the engine is gone: {self.process.wait(WAIT_S)}"
        self._unread += data
        while len(self._unread) >= 4 and len(self._unread) >= (end := 4 + struct.unpack_from("<I", self._unread)[0]):
            self.inbox.append(self._codec.decode(self._unread[4:end]))
            self._unread = self._unread[end:]

"""An engine process without tensors, for faults a real one should not have. Speaks the real frames.

Counts instead of thinking: token i of a sequence is its position. The model's name says what goes wrong:
dies-at-bind, dies-slowly (its socket closed), babbles (and stays), fails-to-bind, never-binds,
never-unbinds (and ignores SIGTERM), dies-at-submit, rots-at-submit (its bytes do), bad-adapter,
lets-go (of its frames, as where a device has memory).
"""

import argparse
import os
import select
import signal
import socket
import struct
import sys
import time

from nearline.protocol import FinishReason, MessageCodec, ModelId, SequenceUpdate, encode
from nearline.protocol.errors import ErrorInfo
from nearline.protocol.frames import (
    Abort,
    AdapterEvicted,
    AdapterLoaded,
    Bind,
    BindFailed,
    Bound,
    EngineReady,
    FramesFree,
    LoadAdapter,
    Ping,
    Pong,
    PoolLayout,
    StepDone,
    Submit,
    ToEngine,
    Unbind,
    Unbound,
)

STEP_S = 0.005
CODEC = MessageCodec(ToEngine)


class StandIn:
    def __init__(self, agent: socket.socket) -> None:
        self.agent = agent
        self.model = ModelId("")
        self.running: dict[str, tuple[Submit, int]] = {}

    def send(self, message: object) -> None:
        body = encode(message)
        self.agent.sendall(struct.pack("<I", len(body)) + body)

    def receive(self) -> object:
        (length,) = struct.unpack("<I", self._exactly(4))
        return CODEC.decode(self._exactly(length))

    def serve(self) -> None:
        self.send(EngineReady(os.getpid(), "none", 0.0))
        while True:
            readable, _, _ = select.select([self.agent], [], [], STEP_S if self.running else None)
            if readable:
                self.handle(self.receive())
            elif self.running:
                self.step()

    def handle(self, message: object) -> None:
        match message:
            case Bind():
                self.bind(message)
            case Submit():
                if self.model == "rots-at-submit":
                    error = ErrorInfo("checkpoint_corrupt", "chunk 3 is not what was imported")
                    self.send(BindFailed(message.instance_id, error))
                    sys.exit(3)
                if self.model == "dies-at-submit":
                    os.kill(os.getpid(), signal.SIGKILL)
                self.running[message.request.request_id] = (message, len(message.generated_token_ids))
            case Abort():
                self.running.pop(message.request_id, None)
                self.send(StepDone((), len(self.running), 0, 0))
            case Ping(number):
                self.send(Pong(number))
            case LoadAdapter():
                error = ErrorInfo("adapter_mismatch", "rank differs") if self.model == "bad-adapter" else None
                self.send(AdapterLoaded(message.digest, 0.001, 10, error))
                if self.model == "evicts-adapters":
                    self.send(AdapterEvicted(message.digest))
            case Unbind():
                if self.model == "never-unbinds":
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    time.sleep(3600)
                self.running.clear()
                self.send(Unbound(self.model))
            case PoolLayout():
                pass

    def bind(self, bind: Bind) -> None:
        self.model = bind.spec.model_id
        if self.model == "dies-at-bind":
            sys.exit(7)
        if self.model == "dies-slowly":
            self.agent.close()
            time.sleep(2.0)
            sys.exit(7)
        if self.model == "babbles":
            self.agent.sendall(struct.pack("<I", 3) + b"???")
            time.sleep(3600)
        if self.model == "never-binds":
            return
        if self.model == "fails-to-bind":
            error = ErrorInfo("out_of_memory", "needs 9 bytes, 8 available")
            self.send(BindFailed(bind.spec.instance_id, error))
            return
        self.send(Bound(bind.spec.instance_id, 0.001, 4096))
        if self.model == "lets-go":
            self.send(FramesFree(bind.spec.instance_id))

    def step(self) -> None:
        updates = []
        for request_id, (submit, position) in list(self.running.items()):
            is_last = position + 1 >= submit.request.sampling.max_tokens
            finish = FinishReason.LENGTH if is_last else None
            updates.append(SequenceUpdate(submit.request.request_id, submit.attempt, (position,), finish))
            self.running[request_id] = (submit, position + 1)
            if is_last:
                del self.running[request_id]
        self.send(StepDone(tuple(updates), len(self.running), 0, 16 * len(self.running)))

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            piece = self.agent.recv(length - len(data))
            if not piece:
                sys.exit(0)
            data += piece
        return data


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--socket-fd", "--pool-fd", "--ready-fd"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--dies-at-start", action="store_true")
    arguments = parser.parse_args()
    if arguments.dies_at_start:
        sys.exit("no device context")
    os.fstat(arguments.pool_fd), os.fstat(arguments.ready_fd)
    StandIn(socket.socket(fileno=arguments.socket_fd)).serve()

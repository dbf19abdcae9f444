"""One engine process: spawned with its socket and the pool, spoken to in frames, ended for certain, reaped."""

import asyncio
import os
import signal
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from nearline.node_agent.engine_log import EngineLog
from nearline.node_agent.types import EngineId
from nearline.node_agent.watched import watched
from nearline.protocol import MessageCodec, Seconds, WireError, encode
from nearline.protocol.frames import FromEngine, PoolLayout

KILL_AFTER_S: Seconds = 3.0
"""Grace between SIGTERM and SIGKILL."""
EXIT_GRACE_S: Seconds = 5.0
"""Time to exit by itself for a process that has closed its socket: one with torch takes a while on a busy machine."""
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""An engine that reads so little that this much piles up is stuck, and is ended."""
_CODEC = MessageCodec(FromEngine)
_LENGTH = struct.Struct("<I")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start engine processes. The two descriptors are inherited under their own numbers."""

    command: Sequence[str]
    environment: Mapping[str, str]
    pool_fd: int
    ready_fd: int
    layout: PoolLayout
    log_directory: Path


class EngineProcess:
    """Owns the process, our end of its socket and its log, from `run` until it returns."""

    def __init__(self, engine_id: EngineId, launch: Launch, on_frame: Callable[[EngineId, object], None]) -> None:
        self._engine_id = engine_id
        self._launch = launch
        self._on_frame = on_frame
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._killer: asyncio.TimerHandle | None = None
        self._is_doomed = False
        self._cause = ""

    async def run(self) -> str:
        """Run the process to its end and say how it ended. Every frame it sent has been handed on before."""
        ours, theirs = socket.socketpair()
        try:
            with EngineLog(self._launch.log_directory, self._engine_id) as sink:
                process = await self._spawn(theirs)
                theirs.close()
                try:
                    return await self._converse(process, ours, sink)
                finally:
                    await self._reap(process)
        except OSError as error:
            return f"could not start: {error}"
        finally:
            ours.close()
            theirs.close()

    def send(self, message: object) -> None:
        """Write one frame; what a dying process cannot read any more is lost, and its end is reported anyway."""
        writer = self._writer
        if writer is None or writer.is_closing():
            return
        body = encode(message)
        writer.write(_LENGTH.pack(len(body)) + body)
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("engine does not read; ending it", engine_id=self._engine_id)
            self.kill()

    def kill(self) -> None:
        """Ask it to end, and end it when it does not listen. Returns at once; `run` returns when it is gone."""
        self._is_doomed = True
        if self._process is None or self._killer is not None:
            return
        self._signal(signal.SIGTERM)
        self._killer = asyncio.get_running_loop().call_later(KILL_AFTER_S, self._signal, signal.SIGKILL)

    def kill_hung(self, cause: str) -> None:
        """End a process that does not answer at once, and say why in how it ended."""
        self._is_doomed, self._cause = True, f"{cause}: "
        self._signal(signal.SIGKILL)

    async def _spawn(self, theirs: socket.socket) -> asyncio.subprocess.Process:
        launch, fd = self._launch, theirs.fileno()
        descriptors = ["--socket-fd", str(fd), "--pool-fd", str(launch.pool_fd), "--ready-fd", str(launch.ready_fd)]
        self._process = await asyncio.create_subprocess_exec(
            *launch.command,
            *descriptors,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(launch.environment),
            pass_fds=(fd, launch.pool_fd, launch.ready_fd),
            start_new_session=True,  # a Ctrl-C in the terminal is the agent's business
        )
        log.info("engine started", engine_id=self._engine_id, pid=self._process.pid)
        if self._is_doomed:
            self.kill()
        return self._process

    async def _converse(self, process: asyncio.subprocess.Process, ours: socket.socket, sink: EngineLog) -> str:
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self.send(self._launch.layout)
        logging = watched(self._copy_output(process, sink), f"log of engine {self._engine_id}")
        reading = watched(self._read_frames(reader), f"frames of engine {self._engine_id}")
        exiting = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((reading, exiting), return_when=asyncio.FIRST_COMPLETED)
            if not self._is_doomed:
                # It closed its socket, so nothing more can come of it; its own exit code says more than our signal.
                await asyncio.wait((exiting,), timeout=EXIT_GRACE_S)
            if not exiting.done():
                self.kill()
            code = await exiting
            # A stray child may hold the socket open; what the engine itself wrote is already there.
            await asyncio.wait((reading, logging), timeout=0.5)
            return self._cause + _how(code, sink.path)
        finally:
            for task in (reading, logging, exiting):
                task.cancel()
            await asyncio.gather(reading, logging, exiting, return_exceptions=True)
            self._writer.close()

    async def _read_frames(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(4))
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"a frame of {length} bytes")
                self._on_frame(self._engine_id, _CODEC.decode(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except WireError as error:
            log.error("engine speaks another language; ending it", engine_id=self._engine_id, error=str(error))
            self.kill_hung("it sent what is no message")

    async def _copy_output(self, process: asyncio.subprocess.Process, sink: EngineLog) -> None:
        assert process.stdout is not None
        while data := await process.stdout.read(65536):
            sink.write(data)

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            self._signal(signal.SIGKILL)
            await process.wait()
        if self._killer:
            self._killer.cancel()

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            if number is signal.SIGKILL:
                os.killpg(process.pid, number)  # it leads its own group: children go with it
            else:  # not `send_signal`: its look whether the process lives would take how it ended from who waits (255)
                os.kill(process.pid, number)
        except ProcessLookupError:
            pass


def _how(code: int, log_path: Path) -> str:
    what = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{what}; see {log_path.name}"

"""One importing process: it is told a wish and says how far it is, until the outcome. It may be told another then."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from nearline.protocol import Seconds
from nearline.protocol.errors import Fault
from nearline.protocol.frames import ImportCheckpoint

KILL_AFTER_S: Seconds = 3.0
MAX_LINE_BYTES = 4 * 1024 * 1024
_STDERR_TAIL = 800


class ImportProcess:
    """Owns a process in a session of its own, until `end`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._tail = b""
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, root: Path, environment: Mapping[str, str]) -> "ImportProcess":
        command = [sys.executable, "-m", "nearline.checkpoint_store", "import", "--root", str(root)]
        command += ["--asks-for-room", "--stays"]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
            env=environment,
        )
        return cls(process)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, wish: ImportCheckpoint) -> AsyncGenerator[dict[str, Any], None]:
        """Wish for an import; yield what the process says of it, the outcome last.

        Raises Fault when the process ends without an outcome.
        """
        await self.answer({"kind": wish.kind.value, "source": wish.source, "base": wish.base_digest})
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict):
                yield said
                if "checkpoint" in said or "error" in said:
                    return
        code = await self._process.wait()
        await self._listening
        words = self._tail.decode(errors="replace").strip()
        raise Fault(f"the import of {wish.source} ended without an outcome (exit {code}); last words: {words!r}")

    async def answer(self, plain: Mapping[str, Any]) -> None:
        """Write a line to the process. Nothing happens if it has ended: its outcome says why."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(plain).encode() + b"\n")
            await self._process.stdin.drain()

    async def end(self) -> None:
        """Terminate, then kill, what may have ended already; it is reaped even when we are cancelled."""
        self._listening.cancel()
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(KILL_AFTER_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(65536):
            self._tail = (self._tail + data)[-_STDERR_TAIL:]

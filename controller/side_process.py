"""A process beside the event loop for what may take long or die: asked one thing at a time (pipes.py is its side)."""

import asyncio
import contextlib
import os
import signal
import sys

from nearline.controller.pipes import LENGTH
from nearline.protocol import Seconds


class ProcessEnded(EOFError):
    """The process ended instead of answering. `returncode` as of subprocess: minus the signal that ended it."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"the process ended with {returncode}")
        self.returncode = returncode


class SideProcess:
    """Owns: the process of a module's main, made at the first question and again after it failed."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def ask(self, question: bytes, limit_s: Seconds) -> bytes:
        """Return the answer. One call at a time.

        Raises ProcessEnded, OSError when there can be none, TimeoutError. After any of these, and when the caller is
        cancelled, the next question has a new process.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await self._exchange(question)
        except (EOFError, ConnectionError):
            raise ProcessEnded(await self.end()) from None
        except BaseException:
            await self.end()
            raise

    async def _exchange(self, question: bytes) -> bytes:
        if self._process is not None and self._process.returncode is not None:  # it died while nobody asked
            self._process = None
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "it was asked for"
        assert stdout is not None, "it was asked for"
        stdin.write(LENGTH.pack(len(question)) + question)
        await stdin.drain()
        (length,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
        return await stdout.readexactly(length)

    async def end(self) -> int:
        """Kill the process, whatever it does, and return how it ended; 0 if there is none."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.returncode is None:
            # Not `kill()`: its look whether the process lives would take how it ended from who waits for it (255).
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return await process.wait()

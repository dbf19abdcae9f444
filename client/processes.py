"""Child processes that must not outlive us and must come back when they fall."""

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nearline.protocol.log_files import MAX_SERVICE_LOG_BYTES, older

PR_SET_PDEATHSIG = 1
MAX_BACKOFF_S = 10.0
STABLE_AFTER_S = 30.0
"""A child that ran this long before it died starts again at once; one that dies sooner waits longer each time."""

_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent thread ends, even by kill -9. Runs between fork and exec."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@dataclass(slots=True)
class Child:
    """One supervised command. `log` receives both of its output streams."""

    name: str
    command: list[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    num_refusals: int = 0
    """Times in a row that it ended by itself, with an error, soon after its start: it cannot run as it was told to."""

    async def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment},
                start_new_session=True,  # Ctrl-C reaches us alone; we stop the children in order
                preexec_fn=die_with_parent,
            )

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def keep_running(self, on_restart: Callable[["Child"], None]) -> None:
        """Restart the child whenever it ends, with growing pauses while it keeps falling. Runs until cancelled."""
        backoff_s = 0.2
        while True:
            started_at = time.monotonic()
            assert self.process is not None
            status = await self.process.wait()
            is_stable = time.monotonic() - started_at > STABLE_AFTER_S
            backoff_s = 0.2 if is_stable else min(MAX_BACKOFF_S, backoff_s * 2)
            self.num_refusals = self.num_refusals + 1 if status > 0 and not is_stable else 0
            on_restart(self)
            await asyncio.sleep(backoff_s)
            await self.start()

    def cut_log(self) -> None:
        """Begin the log anew if it is full. The child has it open, so what it holds is copied and the file emptied: a
        line written in that very moment is lost. Where a full disk takes no copy, the log stays as it is."""
        incoming = older(self.log).with_suffix(".new")
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > MAX_SERVICE_LOG_BYTES:
                try:
                    shutil.copyfile(self.log, incoming)
                    incoming.replace(older(self.log))
                    os.truncate(self.log, 0)
                finally:
                    incoming.unlink(missing_ok=True)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, wait, then SIGKILL."""
        if not self.is_running or self.process is None:
            return
        self.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    def terminate(self) -> None:
        """Send SIGTERM, again if it had one."""
        if self.is_running and self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    def log_tail(self, num_lines: int = 8) -> str:
        """The last lines the child wrote, for an error message."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-num_lines:])

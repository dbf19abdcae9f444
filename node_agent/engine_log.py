"""The log file of one engine process: what it writes to stdout and stderr, bounded in size and in number."""

from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from nearline.protocol.log_files import MAX_LOG_BYTES, older

MAX_LOGS = 16


class EngineLog:
    """Appends to `engine-<id>.log`; when full it becomes `.old` and a new one begins. Owns the open file.

    A full disk loses log lines, never an engine: what cannot be opened now is tried again with the next line.
    """

    def __init__(self, directory: Path, engine_id: int) -> None:
        self.path = directory / f"engine-{engine_id}.log"
        self._file: FileIO | None = None
        self._num_bytes = 0
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            _remove_oldest(directory)
            older(self.path).unlink(missing_ok=True)
            self._begin()

    def write(self, data: bytes) -> None:
        """Append."""
        with suppress(OSError):
            if self._num_bytes + len(data) > MAX_LOG_BYTES:
                self._end()
                self._num_bytes = 0
                self.path.replace(older(self.path))
            file = self._file or self._begin()
            file.write(data)
            self._num_bytes += len(data)

    def _begin(self) -> FileIO:
        self._file = self.path.open("wb", buffering=0)
        return self._file

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()


def _remove_oldest(directory: Path) -> None:
    logs = sorted(directory.glob("engine-*.log*"), key=lambda path: path.stat().st_mtime)
    for path in logs[: max(0, len(logs) - MAX_LOGS + 1)]:
        path.unlink(missing_ok=True)

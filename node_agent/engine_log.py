"""The log file of one engine process: what it writes to stdout and stderr, bounded in size and in number."""

from pathlib import Path
from types import TracebackType
from typing import Self

from nearline.protocol.log_files import MAX_LOG_BYTES, older

MAX_LOGS = 16


class EngineLog:
    """Appends to `engine-<id>.log`; when full it becomes `.old` and a new one begins. Owns the open file."""

    def __init__(self, directory: Path, engine_id: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"engine-{engine_id}.log"
        _remove_oldest(directory)
        older(self.path).unlink(missing_ok=True)
        self._file = self.path.open("wb", buffering=0)
        self._num_bytes = 0

    def write(self, data: bytes) -> None:
        """Append. A full disk loses log lines, never an engine."""
        try:
            if self._num_bytes + len(data) > MAX_LOG_BYTES:
                self._file.close()
                self.path.replace(older(self.path))
                self._file = self.path.open("wb", buffering=0)
                self._num_bytes = 0
            self._file.write(data)
            self._num_bytes += len(data)
        except OSError:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def _remove_oldest(directory: Path) -> None:
    logs = sorted(directory.glob("engine-*.log*"), key=lambda path: path.stat().st_mtime)
    for path in logs[: max(0, len(logs) - MAX_LOGS + 1)]:
        path.unlink(missing_ok=True)

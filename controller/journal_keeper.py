"""Keeps a journal going: a disk that refuses costs the journal a gap, and the controller nothing."""

from pathlib import Path

import structlog

from nearline.controller.config import RuntimeConfig
from nearline.controller.events import Event
from nearline.controller.journal import JournalWriter
from nearline.protocol import Seconds

RESUME_AFTER_S: Seconds = 10.0
log = structlog.get_logger(__name__)


class JournalKeeper:
    """Records events, or counts in `num_errors` that it could not. Owns: the writer; no directory, no journal.

    After a gap it goes on in a file whose number leaves one out, so that no replay mistakes what follows the gap for
    what follows the last record.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self.num_errors = 0
        self._config = config
        self._writer: JournalWriter | None = None
        self._part = 0
        self._resume_at: Seconds = float("-inf")

    def record(self, event: Event, now: Seconds) -> None:
        """Append one event. Never raises OSError."""
        if self._config.journal_directory is None:
            return
        try:
            if self._writer is None:
                if now < self._resume_at:
                    return
                self._writer = self._open(self._config.journal_directory)
                log.info("journal open", path=str(self._writer.path))
            self._writer.write(event, now)
        except OSError as error:
            self.num_errors += 1
            log.error("journal interrupted: the disk refuses", error=str(error), retry_s=RESUME_AFTER_S)
            self._resume_at = now + RESUME_AFTER_S
            if self._writer is not None:
                self._part = self._writer.part + 2
            else:  # the first file never began: nothing that follows can be replayed
                self._part = max(self._part, 1)
            self.close()

    def _open(self, directory: str) -> JournalWriter:
        limits = (self._config.journal_part_bytes, self._config.journal_num_parts)
        return JournalWriter(Path(directory), self._config.core, *limits, part=self._part)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

"""Standard error as a place for logs: what cannot be written there is lost, and nothing else is."""

import io
import os
from contextlib import suppress


class Stderr(io.StringIO):
    """File descriptor 2, which may be closed, broken or a file on a full disk. Never raises for it. A line is one
    write, so lines of processes that share the descriptor do not mix; one caller at a time, as a logger's lock sees to.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begun = ""

    def write(self, text: str) -> int:
        self._begun += text
        if text.endswith("\n"):
            self.flush()
        return len(text)

    def flush(self) -> None:
        data, self._begun = self._begun.encode("utf-8", "replace"), ""
        if data:
            with suppress(OSError):
                os.write(2, data)

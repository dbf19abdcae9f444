"""Standard error as a place for logs: what cannot be written there is lost, and nothing else is."""

import io
import os


class Stderr(io.StringIO):
    """File descriptor 2, which may be closed, broken or a file on a full disk. Never raises for it."""

    def write(self, text: str) -> int:
        try:
            os.write(2, text.encode("utf-8", "replace"))
        except OSError:
            return 0
        return len(text)

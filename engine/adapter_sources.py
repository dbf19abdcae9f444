"""Where the next read of each adapter finds its bytes: lent by the node agent, for that one read, or in its directory.

Wrong bytes cannot be read: an offer is used by one read at most, and what is not in use is given back at once. The
agent keeps the bytes in place until then. A read that takes too long, waiting or under way, is given up: nobody waits
for a disk that never answers.
"""

from collections.abc import Callable

from nearline.engine.adapters import ReadAdapter
from nearline.protocol import Digest, Seconds
from nearline.protocol.frames import AdapterBytes, AdapterWanted, ExtentsFree

READ_LIMIT_S: Seconds = 60.0
"""Longest time from the wish to read an adapter to its end: the disk may be busy with whole models before it."""
Start = Callable[[ReadAdapter, AdapterBytes | None], None]


class AdapterSources:
    """`start` begins a read, from what was lent or from the directory (None); `tell` sends to the agent."""

    def __init__(self, start: Start, tell: Callable[[object], None]) -> None:
        self._start = start
        self._tell = tell
        self._pooled: dict[Digest, None] = {}
        self._offers: dict[Digest, AdapterBytes] = {}
        self._waiting: dict[Digest, ReadAdapter] = {}
        self._due: dict[Digest, Seconds] = {}
        """When each read that waits or is under way is given up."""

    def know(self, digest: Digest, is_pooled: bool) -> None:
        """Whether the agent is to be asked where an adapter's bytes are."""
        self._pooled.pop(digest, None)
        if is_pooled:
            self._pooled[digest] = None

    def offer(self, lent: AdapterBytes) -> None:
        """Take in where an adapter's bytes are: for the read that waits for it, or for one that begins before
        `settle`. None can of an adapter that the instance, if there is one, does not have from the agent."""
        action = self._waiting.pop(lent.digest, None)
        if action is not None:
            self._start(action, lent if lent.extents else None)
            return
        self._give_back(lent.digest)
        if lent.extents:
            self._offers[lent.digest] = lent
        if lent.digest not in self._pooled:
            self._give_back(lent.digest)

    def read(self, action: ReadAdapter, now: Seconds) -> None:
        """Begin a read, or ask where to read."""
        self._due[action.digest] = now + READ_LIMIT_S
        lent = self._offers.pop(action.digest, None)
        if lent is not None or action.digest not in self._pooled:
            self._start(action, lent)
            return
        self._waiting[action.digest] = action
        self._tell(AdapterWanted(action.digest))

    def ended(self, digest: Digest) -> bool:
        """Whether a read that has ended was awaited still; what comes too late is not."""
        return self._due.pop(digest, None) is not None

    def overdue(self, now: Seconds) -> list[Digest]:
        """Give up the reads that took too long, and name them."""
        overdue = [digest for digest, due in self._due.items() if due <= now]
        for digest in overdue:
            del self._due[digest]
            self._waiting.pop(digest, None)
        return overdue

    @property
    def next_due(self) -> Seconds | None:
        """When `overdue` may name the next one."""
        return min(self._due.values(), default=None)

    def settle(self) -> None:
        """Give back what no read has begun with."""
        for digest in list(self._offers):
            self._give_back(digest)

    def unbound(self) -> None:
        """Forget the reads that wait, and whom to ask for: the instance is gone. Answers may still come."""
        self._waiting.clear()
        self._due.clear()
        self._pooled.clear()
        self.settle()

    def _give_back(self, digest: Digest) -> None:
        lent = self._offers.pop(digest, None)
        if lent is not None:
            self._tell(ExtentsFree(lent.lease_id))

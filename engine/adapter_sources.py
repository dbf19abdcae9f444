"""Where the next read of each adapter finds its bytes: lent by the node agent, for that one read, or in its directory.

Wrong bytes cannot be read: an offer is used by one read at most, and what is not in use is given back at once. The
agent keeps the bytes in place until then. An answer that takes too long is not waited for, nor is a read
(adapter_reader.py): nobody waits for a disk that never answers.
"""

from collections.abc import Callable

from nearline.engine.adapters import ReadAdapter
from nearline.protocol import Digest, Seconds
from nearline.protocol.frames import AdapterBytes, AdapterWanted, ExtentsFree

READ_LIMIT_S: Seconds = 60.0
"""Longest time that the agent may take for an answer, and then a read: the disk may be busy with whole models."""
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
        """Until when each answer is waited for."""
        self._awaited: dict[Digest, None] = {}
        """Reads that wait or are under way, and are not given up."""

    def know(self, digest: Digest, is_pooled: bool) -> None:
        """Whether the agent is to be asked where an adapter's bytes are."""
        self._pooled.pop(digest, None)
        if is_pooled:
            self._pooled[digest] = None

    def offer(self, lent: AdapterBytes, now: Seconds) -> None:
        """Take in where an adapter's bytes are: for the read that waits for it, or for one that begins before
        `settle`. None can of an adapter that the instance, if there is one, does not have from the agent.

        Those asked for after it have their time anew: the agent's disk was busy with this one."""
        if lent.digest in self._waiting:
            asked = list(self._waiting)
            self._due |= dict.fromkeys(asked[asked.index(lent.digest) + 1 :], now + READ_LIMIT_S)
            action = self._waiting[lent.digest]
            self._stop_waiting(lent.digest)
            self._start(action, lent if lent.extents else None)
            return
        self._give_back(lent.digest)
        if lent.extents:
            self._offers[lent.digest] = lent
        if lent.digest not in self._pooled:
            self._give_back(lent.digest)

    def read(self, action: ReadAdapter, now: Seconds) -> None:
        """Begin a read, or ask where to read."""
        self._awaited[action.digest] = None
        self._stop_waiting(action.digest)
        lent = self._offers.pop(action.digest, None)
        if lent is not None or action.digest not in self._pooled:
            self._start(action, lent)
            return
        self._waiting[action.digest] = action
        self._due[action.digest] = now + READ_LIMIT_S
        self._tell(AdapterWanted(action.digest))

    def ended(self, digest: Digest) -> bool:
        """Whether a read that has ended, or was given up, was awaited still; what comes too late is not."""
        was_awaited = digest in self._awaited
        self._awaited.pop(digest, None)
        return was_awaited

    def overdue(self, now: Seconds) -> list[Digest]:
        """Give up the reads for which no answer came, and name them."""
        overdue = [digest for digest, due in self._due.items() if due <= now]
        for digest in overdue:
            self._stop_waiting(digest)
            self._awaited.pop(digest, None)
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
        self._awaited.clear()
        self._pooled.clear()
        self.settle()

    def _stop_waiting(self, digest: Digest) -> None:
        self._waiting.pop(digest, None)
        self._due.pop(digest, None)

    def _give_back(self, digest: Digest) -> None:
        lent = self._offers.pop(digest, None)
        if lent is not None:
            self._tell(ExtentsFree(lent.lease_id))

"""How many names, versions and requests need each checkpoint, kept as they come and go: nothing is searched. Pure."""

from dataclasses import dataclass, field

from nearline.protocol import Digest


@dataclass(slots=True)
class References:
    """Counts per digest. `freed` are those that nothing has needed any more since `take_freed`, needed again or not."""

    counts: dict[Digest, int] = field(default_factory=dict)
    freed: dict[Digest, None] = field(default_factory=dict)

    def add(self, digest: Digest | None) -> None:
        if digest is not None:
            self.counts[digest] = self.counts.get(digest, 0) + 1

    def drop(self, digest: Digest | None) -> None:
        if digest is None:
            return
        if self.counts[digest] > 1:
            self.counts[digest] -= 1
        else:
            del self.counts[digest]
            self.freed[digest] = None

    def take_freed(self) -> list[Digest]:
        """What has been freed and is needed by nothing now."""
        freed, self.freed = self.freed, {}
        return [digest for digest in freed if digest not in self.counts]

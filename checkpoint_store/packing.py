"""Where small checkpoints lie in pack frames: frames of the DRAM pool that hold many of them, an extent each. Pure.

Only places. Who is pinned or read, and what the loss of one costs, is tiers.py's business.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from nearline.checkpoint_store.types import DATA_ALIGNMENT
from nearline.protocol import Bytes, Digest, Extent

Loss = Callable[[Digest], float | None]
"""What being without a checkpoint costs; None: it must stay where it is."""


@dataclass(frozen=True, slots=True, order=True)
class _Piece:
    start: Bytes
    """Within its frame."""
    end: Bytes
    digest: Digest


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbours whose going makes a hole that is large enough, and what their loss costs."""

    digests: tuple[Digest, ...]
    loss: float


class Packs:
    """The pack frames and what lies in them. Extents begin on multiples of 4096 bytes and never overlap; a pack frame
    holds at least one checkpoint."""

    def __init__(self, frame_bytes: Bytes) -> None:
        self._frame_bytes = frame_bytes
        self._pieces: dict[int, list[_Piece]] = {}
        self._largest_hole: dict[int, Bytes] = {}
        self._places: dict[Digest, tuple[int, Extent]] = {}

    @property
    def frames(self) -> tuple[int, ...]:
        return tuple(self._pieces)

    def has(self, frame: int) -> bool:
        return frame in self._pieces

    def contents(self, frame: int) -> tuple[Digest, ...]:
        """Name the checkpoints in a pack frame, in order of their bytes."""
        return tuple(piece.digest for piece in self._pieces[frame])

    def extent(self, digest: Digest) -> Extent:
        """Tell where in the pool a checkpoint lies."""
        return self._places[digest][1]

    def open(self, frame: int, digest: Digest, num_bytes: Bytes) -> None:
        """Make a pack of a free frame, with a first checkpoint in it."""
        assert frame not in self._pieces
        assert num_bytes <= self._frame_bytes
        self._pieces[frame] = []
        self._put(frame, 0, digest, num_bytes)

    def place(self, digest: Digest, num_bytes: Bytes) -> bool:
        """Give a checkpoint an extent in the fullest pack that has a hole for it. False: none has."""
        size = _aligned(num_bytes)
        fitting = [frame for frame, hole in self._largest_hole.items() if hole >= size]
        if not fitting:
            return False
        frame = min(fitting, key=lambda f: (self._largest_hole[f], f))
        holes = [(end - start, start) for start, end in self._holes(frame) if end - start >= size]
        self._put(frame, min(holes)[1], digest, num_bytes)
        return True

    def remove(self, digest: Digest) -> int | None:
        """Free a checkpoint's extent. Returns the frame when it was the last in it: it is no pack any more."""
        frame, _ = self._places.pop(digest)
        left = [piece for piece in self._pieces[frame] if piece.digest != digest]
        if left:
            self._pieces[frame] = left
            self._measure(frame)
            return None
        del self._pieces[frame], self._largest_hole[frame]
        return frame

    def cheapest_window(self, num_bytes: Bytes, loss: Loss) -> Window | None:
        """Find the neighbours whose loss costs least among all whose going makes a hole of `num_bytes`."""
        size = _aligned(num_bytes)
        windows = [w for frame in self._pieces for w in self._windows(frame, size, loss)]
        return min(windows, key=lambda w: (w.loss, len(w.digests), w.digests), default=None)

    def check(self) -> None:
        """Assert the invariants of the class docstring."""
        seen = {}
        for frame, pieces in self._pieces.items():
            assert pieces, f"pack frame {frame} is empty"
            ends = [0, *(_aligned(piece.end) for piece in pieces)]
            starts = [*(piece.start for piece in pieces), self._frame_bytes]
            assert all(end <= start for end, start in zip(ends, starts, strict=True)), "two extents overlap"
            assert not any(piece.start % DATA_ALIGNMENT for piece in pieces)
            assert self._largest_hole[frame] == max(start - end for end, start in zip(ends, starts, strict=True))
            for piece in pieces:
                extent = Extent(frame * self._frame_bytes + piece.start, piece.end - piece.start)
                seen[piece.digest] = (frame, extent)
        assert seen == self._places
        assert self._largest_hole.keys() == self._pieces.keys()

    def _put(self, frame: int, start: Bytes, digest: Digest, num_bytes: Bytes) -> None:
        insort(self._pieces[frame], _Piece(start, start + num_bytes, digest))
        self._places[digest] = (frame, Extent(frame * self._frame_bytes + start, num_bytes))
        self._measure(frame)

    def _measure(self, frame: int) -> None:
        self._largest_hole[frame] = max(end - start for start, end in self._holes(frame))

    def _holes(self, frame: int) -> list[tuple[Bytes, Bytes]]:
        pieces = self._pieces[frame]
        starts = [0, *(_aligned(piece.end) for piece in pieces)]
        return list(zip(starts, [*(piece.start for piece in pieces), self._frame_bytes], strict=True))

    def _windows(self, frame: int, size: Bytes, loss: Loss) -> list[Window]:
        """For every piece that may go, the fewest from it on whose going makes the hole."""
        pieces, windows = self._pieces[frame], []
        losses = [loss(piece.digest) for piece in pieces]
        holes = self._holes(frame)
        last = 0  # of the window [first, last)
        for first in range(len(pieces)):
            last = max(first, last)
            while last < len(pieces) and losses[last] is not None and holes[last][1] - holes[first][0] < size:
                last += 1
            if last > first and holes[last][1] - holes[first][0] >= size:
                total = sum(one for one in losses[first:last] if one is not None)
                windows.append(Window(tuple(piece.digest for piece in pieces[first:last]), total))
        return windows


def _aligned(num_bytes: Bytes) -> Bytes:
    return -(-num_bytes // DATA_ALIGNMENT) * DATA_ALIGNMENT

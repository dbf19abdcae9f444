"""What the importers hand to the publisher: a checkpoint that is described but not yet written, and whom to tell."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from nearline.protocol import Bytes, CheckpointInfo

Block = bytes | bytearray | memoryview
"""Some bytes of a tensor; valid only until the next one is asked for."""


@dataclass(frozen=True, slots=True)
class DraftTensor:
    """One tensor to write. `blocks()` starts a fresh pass over its bytes, so that nobody holds a whole model."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: Bytes
    blocks: Callable[[], Iterator[Block]]


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint to publish: tensors in file order, small files by name, and what is known before the digest.

    `info.digest`, `info.num_bytes` and `info.files` are filled in by the publisher. `conclude`, if any, gives the small
    files and the info again once all tensors have passed: what quantisation lost is known only then.
    """

    tensors: tuple[DraftTensor, ...]
    files: Mapping[str, bytes]
    info: CheckpointInfo
    conclude: Callable[[], tuple[Mapping[str, bytes], CheckpointInfo]] | None = None

    def concluded(self) -> "Draft":
        """Return the draft as it is after its tensors have been written."""
        return self if self.conclude is None else Draft(self.tensors, *self.conclude())


def _no_progress(phase: str, done_bytes: Bytes, total_bytes: Bytes) -> None:
    """Tell nobody."""


def _no_warning(message: str) -> None:
    """Tell nobody."""


def _no_room_to_make(num_bytes: Bytes) -> None:
    """Ask nobody."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """Whom an import tells: `progress(phase, done_bytes, total_bytes)` often, `warn(message)` for what it dropped; and
    whom it asks for place before it writes: `make_room(num_bytes)`, which raises StorageFull if there is none."""

    progress: Callable[[str, Bytes, Bytes], None] = _no_progress
    warn: Callable[[str], None] = _no_warning
    make_room: Callable[[Bytes], None] = _no_room_to_make

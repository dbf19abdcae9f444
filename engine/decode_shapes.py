"""Sizes in which decoding steps are recorded, and the padded numbers of one. Pure.

A recorded step runs with the sizes it was recorded with, so few sizes serve all steps: the rest is padding, rows that
read block 0 and store nothing.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from nearline.engine.types import BatchItem
from nearline.protocol import Bytes
from nearline.protocol.errors import InvalidRequest

MAX_SEQUENCES = 128
"""Larger steps keep a device busy long enough for the host to launch the next ops meanwhile."""
_MIN_BLOCKS = 32
_FINE_FROM = 8


@dataclass(frozen=True, slots=True, order=True)
class DecodeShape:
    """A step of so many sequences, each of at most so many blocks."""

    num_sequences: int
    num_blocks: int

    @property
    def parts(self) -> tuple[int, ...]:
        """Lengths of what `decode_numbers` says: ids, positions, slots, query starts, context lengths, block tables."""
        return (
            *(self.num_sequences,) * 3,
            self.num_sequences + 1,
            self.num_sequences,
            self.num_sequences * self.num_blocks,
        )

    def kept_bytes(self, vocab_size: int) -> Bytes:
        """Bytes that a recorded step of this size keeps at least: its numbers and its logits."""
        return 4 * (sum(self.parts) + self.num_sequences * vocab_size)


def shape_of(items: Seq[BatchItem], block_size: int) -> DecodeShape | None:
    """Return the smallest recorded size that holds a step; None if it must not be replayed.

    Only steps that decode one plain token per sequence are: adapters and prompts change what is launched.
    """
    if not 0 < len(items) <= MAX_SEQUENCES or not all(_is_plain(item) for item in items):
        return None
    longest = max(item.start // block_size + 1 for item in items)
    return DecodeShape(_num_sequences(len(items)), max(_MIN_BLOCKS, 1 << (longest - 1).bit_length()))


def decode_numbers(items: Seq[BatchItem], shape: DecodeShape, block_size: int, vocab_size: int) -> list[int]:
    """Pack a step as the numbers of its shape, in the order of `parts`.

    Raises InvalidRequest if a token id is outside the vocabulary.
    """
    padding = shape.num_sequences - len(items)
    ids = [item.sequence.token_ids[item.start] for item in items]
    if min(ids, default=0) < 0 or max(ids, default=0) >= vocab_size:
        raise InvalidRequest(f"a token id lies outside the vocabulary of {vocab_size}")
    positions = [item.start for item in items]
    slots, tables = [], []
    for item in items:
        table = item.sequence.block_table[: item.start // block_size + 1]
        slots.append(table[item.start // block_size] * block_size + item.start % block_size)
        tables += [*table, *[0] * (shape.num_blocks - len(table))]
    return [
        *ids, *[0] * padding, *positions, *[0] * padding, *slots, *[-1] * padding, *range(shape.num_sequences + 1),
        *[position + 1 for position in positions], *[1] * padding, *tables, *[0] * (padding * shape.num_blocks),
    ]  # fmt: skip


@dataclass(slots=True)
class RecordingPlan:
    """Says when a size has come often enough to be worth recording, which takes about as long as two steps.

    So the first tokens of a cold start never wait for a recording. What recordings keep of the device's memory
    exceeds `max_bytes` by no more than the last of them takes.
    """

    max_bytes: Bytes
    after_steps: int = 4
    max_recorded: int = 48
    """Bounds also what the driver keeps of each, which nobody counts."""
    num_recorded: int = 0
    taken_bytes: Bytes = 0
    _seen: dict[DecodeShape, int] = field(default_factory=dict)

    def is_due(self, shape: DecodeShape, kept_bytes: Bytes) -> bool:
        """Count one step of this size, which would keep at least so many bytes; say whether to record it now."""
        self._seen[shape] = self._seen.get(shape, 0) + 1
        has_room = self.num_recorded < self.max_recorded and self.taken_bytes + kept_bytes <= self.max_bytes
        return self._seen[shape] > self.after_steps and has_room

    def recorded(self, num_bytes: Bytes) -> None:
        """Take in that a step was recorded and keeps so many bytes."""
        self.num_recorded += 1
        self.taken_bytes += num_bytes


def _num_sequences(count: int) -> int:
    return 1 << (count - 1).bit_length() if count <= _FINE_FROM else -(-count // _FINE_FROM) * _FINE_FROM


def _is_plain(item: BatchItem) -> bool:
    sequence = item.sequence
    is_decode = item.num_tokens == 1 and item.is_sampled and sequence.needs_token and not sequence.reads_prompt
    return is_decode and sequence.request.adapter_digest is None

"""Which preempted sequence keeps its KV in which blocks of the host's memory, and whether that is worth it. Pure."""

from collections import Counter
from collections.abc import Iterable

from nearline.engine.block_manager import BlockManager
from nearline.engine.config import EngineConfig
from nearline.engine.sequence import Sequence
from nearline.protocol import StepTimeModel

BlockMove = tuple[int, int]
"""(from, to): device and host block of a swap out, host and device block of a swap in."""


class HostArea:
    """Owns the blocks of the host area. A swapped sequence holds host blocks and none of the device."""

    def __init__(self, config: EngineConfig) -> None:
        self._block_size = config.block_size
        self._block_copy_s = config.block_bytes / config.copy_bytes_per_s
        self._empty = list(range(config.num_host_blocks - 1, -1, -1))
        self.num_blocks = config.num_host_blocks
        self.num_swaps = 0

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._empty)

    def pays(self, sequence: Sequence, model: StepTimeModel) -> bool:
        """Whether to move a sequence's KV out and back is possible, and quicker than to compute it again."""
        num_blocks = self._num_blocks(sequence.num_computed)
        if not 0 < num_blocks <= len(self._empty):
            return False
        return 2 * num_blocks * self._block_copy_s < model.prefill_s(sequence.num_computed)

    def swap_out(self, sequence: Sequence, blocks: BlockManager) -> list[BlockMove]:
        """Give up a sequence's device blocks for host blocks, of which there must be enough."""
        num_blocks, num_computed = self._num_blocks(sequence.num_computed), sequence.num_computed
        sequence.host_table = [self._empty.pop() for _ in range(num_blocks)]
        moves = list(zip(sequence.block_table, sequence.host_table, strict=False))
        blocks.release(sequence)
        sequence.num_swapped = num_computed
        self.num_swaps += 1
        return moves

    def swap_in(self, sequence: Sequence) -> list[BlockMove]:
        """Restore what its device blocks, all writable since `num_computed`, do not hold already; free the host's."""
        moves: list[BlockMove] = []
        if sequence.num_swapped > sequence.num_computed:
            first = sequence.num_computed // self._block_size
            wanted = range(first, len(sequence.host_table))
            moves = [(sequence.host_table[i], sequence.block_table[i]) for i in wanted]
            sequence.num_computed = sequence.num_swapped
        self.drop(sequence)
        return moves

    def drop(self, sequence: Sequence) -> None:
        """Free a sequence's host blocks, if it has any."""
        self._empty += reversed(sequence.host_table)
        sequence.host_table = []
        sequence.num_swapped = 0

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that `sequences`, all that live, and the empty blocks account for every host block once."""
        held: list[int] = []
        for sequence in sequences:
            held += sequence.host_table
            assert len(sequence.host_table) == self._num_blocks(sequence.num_swapped), "host blocks differ from tokens"
            assert not (sequence.host_table and sequence.block_table), "a swapped sequence holds device blocks"
        assert Counter([*held, *self._empty]) == Counter(range(self.num_blocks)), "a host block is lost or held twice"

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

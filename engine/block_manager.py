"""Which block of the KV cache holds what, for whom. Pure: it counts blocks and never sees a tensor.

A block is *lent* (adapters use as much memory elsewhere) or in exactly one of three places: *empty* (its content
means nothing), *cached* (no sequence uses it, but it holds the KV of a known prefix and may be adopted again), or
*used* by one or more sequences. A used block that is full and computed also bears the key of its prefix, so that
others may share it:

    key(0) = H(root ‖ tokens of block 0),  key(i) = H(key(i-1) ‖ tokens of block i)
    root   = H(checkpoint digest, adapter digest, salt)

so equal keys mean equal model, adapter, tenant and all tokens up to the end of the block. H is BLAKE2b cut to 128
bits: stable between processes and, unlike a fast hash, not open to a tenant who crafts collisions.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from nearline.engine.sequence import Sequence
from nearline.protocol import Digest

BlockCopy = tuple[int, int]
"""(source, destination) of a copy-on-write."""
_KEY_BYTES = 16


def cache_root(checkpoint: Digest, adapter: Digest | None, salt: str) -> bytes:
    """Name the family of prefixes that may share KV: same weights, same adapter, same tenant salt."""
    parts = "\0".join((checkpoint, adapter or "", salt))
    return blake2b(parts.encode(), digest_size=_KEY_BYTES).digest()


class BlockManager:
    """Owns the blocks of one KV cache. Invariant: see `check`."""

    def __init__(self, num_blocks: int, block_size: int, is_prefix_cached: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.is_prefix_cached = is_prefix_cached
        self.num_shared = 0
        """Blocks that two or more sequences use now."""
        self.num_asked_tokens = 0
        self.num_hit_tokens = 0
        self._num_users = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._lent: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def num_lent(self) -> int:
        """Blocks whose memory others use."""
        return len(self._lent)

    @property
    def num_usable(self) -> int:
        """Blocks that are not lent."""
        return self.num_blocks - len(self._lent)

    def lend(self, num_blocks: int) -> int:
        """Leave up to so many free blocks unused, as others use their share of the memory; returns how many.

        The last numbers first: nothing has been written there yet, so no memory stands behind them.
        """
        num_lent = len(self._lent)
        self._empty.sort(reverse=True)
        self._lent += self._empty[:num_blocks]
        del self._empty[:num_blocks]
        while len(self._lent) - num_lent < num_blocks and self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self._lent.append(block)
        return len(self._lent) - num_lent

    def take_back(self, num_blocks: int) -> None:
        """Use so many lent blocks again."""
        assert num_blocks <= len(self._lent), "more blocks come back than were lent"
        at = len(self._lent) - num_blocks
        self._empty += self._lent[at:]
        self._empty.sort(reverse=True)
        del self._lent[at:]

    def adopt_prefix(self, sequence: Sequence) -> None:
        """Give a sequence that has no blocks the longest known prefix of its tokens, shared.

        At least one token is left to compute, because its logits choose the next token; all are for a sequence that
        wants to read its whole prompt.
        """
        assert not sequence.block_table, "adopts a prefix only when it holds no blocks"
        if not self.is_prefix_cached or sequence.reads_prompt:
            return
        for index in range(len(sequence.token_ids) // self.block_size):
            block = self._block_of.get(self._key(sequence, index))
            if block is None:
                break
            self._join(block)
            sequence.block_table.append(block)
        num_known = len(sequence.block_table) * self.block_size
        sequence.num_computed = min(num_known, len(sequence.token_ids) - 1)

    def count_hit(self, sequence: Sequence) -> None:
        """Count the prefix with which a sequence starts towards the hit rate."""
        self.num_asked_tokens += len(sequence.token_ids)
        self.num_hit_tokens += sequence.num_computed

    def num_settled_shared(self, sequence: Sequence) -> int:
        """Count the leading blocks that others use too and that this sequence will never write."""
        count = 0
        for block in sequence.block_table[: sequence.num_computed // self.block_size]:
            if self._num_users[block] < 2:
                break
            count += 1
        return count

    def extend(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Make the next `num_tokens` positions writable: in blocks of this sequence alone, under no key.

        Returns the copies that keep the content of shared blocks, or None, with nothing changed, if blocks lack.
        """
        table = sequence.block_table
        first = sequence.num_computed // self.block_size
        end = -(-(sequence.num_computed + num_tokens) // self.block_size)
        held = range(first, min(end, len(table)))
        num_copies = sum(1 for i in held if self._num_users[table[i]] > 1)
        num_new = max(0, end - len(table))
        if num_copies + num_new > self.num_free:
            return None
        copies: list[BlockCopy] = []
        for i in held:
            if self._num_users[table[i]] > 1:
                copy = self._take()
                copies.append((table[i], copy))
                self._leave(table[i])
                table[i] = copy
            else:
                self._forget(table[i])
        table.extend(self._take() for _ in range(num_new))
        return copies

    def publish(self, sequence: Sequence, start: int) -> None:
        """Let others share the blocks that became full and computed since position `start`."""
        if not self.is_prefix_cached:
            return
        for index in range(start // self.block_size, sequence.num_computed // self.block_size):
            block, key = sequence.block_table[index], self._key(sequence, index)
            if self._key_of[block] is None and key not in self._block_of:
                self._key_of[block] = key
                self._block_of[key] = block

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence. Published ones stay cached, the ends of prefixes evicted first."""
        for block in reversed(sequence.block_table):
            self._leave(block)
        sequence.block_table.clear()
        sequence.num_computed = 0

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that `sequences`, all that hold blocks, and the free blocks account for every block once."""
        users = Counter(block for s in sequences for block in s.block_table)
        assert [users[b] for b in range(self.num_blocks)] == self._num_users, "user counts differ from block tables"
        assert self.num_shared == sum(1 for n in self._num_users if n > 1)
        places = Counter([*self._empty, *self._cached, *self._lent, *[b for b, n in enumerate(self._num_users) if n]])
        assert all(places[b] == 1 for b in range(self.num_blocks)), "a block is in no place or in two"
        assert all(self._key_of[b] is None for b in self._empty), "an empty block bears a key"
        assert all(self._key_of[b] is not None for b in self._cached), "a cached block bears no key"
        assert {k: b for b, k in enumerate(self._key_of) if k is not None} == self._block_of

    def _key(self, sequence: Sequence, index: int) -> bytes:
        keys = sequence.block_keys
        while len(keys) <= index:
            start = len(keys) * self.block_size
            tokens = array("q", sequence.token_ids[start : start + self.block_size])
            previous = keys[-1] if keys else sequence.cache_root
            keys.append(blake2b(previous + tokens.tobytes(), digest_size=_KEY_BYTES).digest())
        return keys[index]

    def _take(self) -> int:
        """Take a free block: an empty one, else the cached one that was used longest ago."""
        block = self._empty.pop() if self._empty else self._cached.popitem(last=False)[0]
        self._forget(block)
        self._num_users[block] = 1
        return block

    def _join(self, block: int) -> None:
        self._num_users[block] += 1
        if self._num_users[block] == 1:
            del self._cached[block]
        elif self._num_users[block] == 2:
            self.num_shared += 1

    def _leave(self, block: int) -> None:
        self._num_users[block] -= 1
        if self._num_users[block] == 1:
            self.num_shared -= 1
        elif self._num_users[block] == 0:
            if self._key_of[block] is None:
                self._empty.append(block)
            else:
                self._cached[block] = None

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None

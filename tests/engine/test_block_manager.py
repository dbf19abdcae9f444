"""Blocks against a model of memory: every slot remembers the prefix it was written for."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nearline.engine import BlockManager, Sequence
from nearline.engine.block_manager import cache_root
from nearline.protocol import Digest
from tests.engine.fake_engine import make_request

SIZE, NUM_BLOCKS = 4, 10
SALTS = ("", "other")


def sequence(tokens: list[int], salt: str = "") -> Sequence:
    root = cache_root(Digest("model"), None, salt)
    return Sequence(make_request("r", tokens, salt=salt), 1, list(tokens), 0.0, cache_root=root)


def compute(blocks: BlockManager, one: Sequence, num_tokens: int) -> list[tuple[int, int]]:
    copies = blocks.extend(one, num_tokens)
    assert copies is not None
    start, one.num_computed = one.num_computed, one.num_computed + num_tokens
    blocks.publish(one, start)
    return copies


class Memory(RuleBasedStateMachine):
    """Random sequences come, grow by chunks, end, and must always find their own prefix in their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, SIZE)
        self.live: list[Sequence] = []
        self.slots: dict[tuple[int, int], Any] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from(SALTS))
    def start(self, tokens: list[int], salt: str) -> None:
        one = sequence(tokens, salt)
        self.blocks.adopt_prefix(one)
        assert one.num_computed < len(tokens)
        assert one.num_computed in (len(one.block_table) * SIZE, len(tokens) - 1)
        self.live.append(one)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.live))
        if one.num_uncomputed == 0:
            one.token_ids.append(data.draw(st.integers(0, 1)))
        num_tokens = data.draw(st.integers(1, one.num_uncomputed))
        before = (list(one.block_table), self.blocks.num_free)
        copies = self.blocks.extend(one, num_tokens)
        if copies is None:
            assert before == (one.block_table, self.blocks.num_free), "a refusal changed something"
            return
        for source, target in copies:
            for offset in range(SIZE):
                self.slots[target, offset] = self.slots.get((source, offset))
        for position in range(one.num_computed, one.num_computed + num_tokens):
            block = one.block_table[position // SIZE]
            assert [s for s in self.live if block in s.block_table] == [one], "a shared block is written"
            self.slots[block, position % SIZE] = (one.request.salt, *one.token_ids[: position + 1])
        start, one.num_computed = one.num_computed, one.num_computed + num_tokens
        self.blocks.publish(one, start)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.live))
        self.live.remove(one)
        self.blocks.release(one)

    @invariant()
    def every_sequence_reads_its_own_prefix(self) -> None:
        for one in self.live:
            for position in range(one.num_computed):
                held = self.slots[one.block_table[position // SIZE], position % SIZE]
                assert held == (one.request.salt, *one.token_ids[: position + 1])

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.blocks.check(self.live)
        assert self.blocks.num_free + self.blocks.num_used == NUM_BLOCKS


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_equal_prefixes_share_blocks_and_different_ones_do_not() -> None:
    blocks = BlockManager(16, SIZE)
    first = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    compute(blocks, first, 9)
    for tokens, salt, expected in (
        ([1, 2, 3, 4, 5, 6, 7, 8, 0], "", 8),
        ([1, 2, 3, 4, 5, 6, 7, 0, 0], "", 4),
        ([0, 2, 3, 4, 5, 6, 7, 8, 9], "", 0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 0], "other", 0),
        ([1, 2, 3], "", 0),
    ):
        second = sequence(tokens, salt)
        blocks.adopt_prefix(second)
        assert second.num_computed == expected
        assert second.block_table == first.block_table[: expected // SIZE]
        blocks.release(second)


def test_a_second_block_does_not_match_without_the_first() -> None:
    blocks = BlockManager(16, SIZE)
    compute(blocks, sequence([1, 1, 1, 1, 2, 2, 2, 2]), 8)
    second = sequence([2, 2, 2, 2, 2])
    blocks.adopt_prefix(second)
    assert second.num_computed == 0


def test_blocks_that_are_not_computed_yet_are_not_shared() -> None:
    blocks, first, second = BlockManager(16, SIZE), sequence([1] * 8), sequence([1] * 8)
    assert blocks.extend(first, 8) == []
    blocks.adopt_prefix(second)
    assert second.num_computed == 0


def test_a_prompt_known_to_its_end_leaves_one_token_and_copies_its_block_when_shared() -> None:
    blocks, first, second = BlockManager(16, SIZE), sequence([1] * 8), sequence([1] * 8)
    compute(blocks, first, 8)
    blocks.adopt_prefix(second)
    assert (second.num_computed, second.block_table) == (7, first.block_table)
    copies = compute(blocks, second, 1)
    assert copies == [(first.block_table[1], second.block_table[1])]
    assert second.block_table[0] == first.block_table[0]
    blocks.check([first, second])


def test_a_known_prompt_that_nobody_else_uses_is_taken_over_without_a_copy() -> None:
    blocks, first, second = BlockManager(2, SIZE), sequence([1] * 8), sequence([1] * 8)
    compute(blocks, first, 8)
    table = list(first.block_table)
    blocks.release(first)
    blocks.adopt_prefix(second)
    assert compute(blocks, second, 1) == []
    assert second.block_table == table


def test_the_least_recently_used_prefix_is_evicted_first_and_its_end_before_its_beginning() -> None:
    blocks = BlockManager(4, SIZE)
    old, new = sequence([1] * 8), sequence([2] * 8)
    for one in (old, new):
        compute(blocks, one, 8)
    blocks.release(old)
    blocks.release(new)
    taker = sequence([3] * 4)
    assert blocks.extend(taker, 4) == []
    for tokens, expected in (([1] * 9, 4), ([2] * 9, 8)):
        probe = sequence(tokens)
        blocks.adopt_prefix(probe)
        assert probe.num_computed == expected
        blocks.release(probe)


def test_without_prefix_cache_nothing_is_shared() -> None:
    blocks, first, second = BlockManager(8, SIZE, is_prefix_cached=False), sequence([1] * 8), sequence([1] * 8)
    compute(blocks, first, 8)
    blocks.adopt_prefix(second)
    assert (second.num_computed, second.block_table) == (0, [])
    blocks.release(first)
    assert blocks.num_free == 8
    blocks.check([])


def test_roots_tell_models_adapters_and_salts_apart() -> None:
    a, b = Digest("a" * 32), Digest("b" * 32)
    roots = [cache_root(a, None, ""), cache_root(b, None, ""), cache_root(a, b, ""), cache_root(a, None, "s"),
             cache_root(a, b, "s")]  # fmt: skip
    assert len(set(roots)) == len(roots)
    assert cache_root(a, b, "s") == cache_root(a, b, "s")


@pytest.mark.parametrize("seed", ["0", "1"])
def test_keys_do_not_depend_on_the_hash_seed_of_the_process(seed: str) -> None:
    import os
    import subprocess
    import sys

    code = "from nearline.engine.block_manager import cache_root; print(cache_root('m', None, 'salt').hex())"
    environment = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == cache_root(Digest("m"), None, "salt").hex()

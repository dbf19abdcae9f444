"""Memory of adapters: lent out of the KV budget and given back, touched ahead, used again."""

import gc

import torch

from nearline.engine import EngineCore, FreeAdapter
from nearline.engine.adapter_memory import AdapterMemory
from nearline.engine.block_manager import BlockManager
from nearline.engine.config import EngineConfig
from nearline.engine.types import SampledToken
from nearline.protocol import Digest
from tests.engine.fake_engine import info, make_request

A, B = Digest("a" * 32), Digest("b" * 32)
CONFIG = EngineConfig(num_blocks=10, block_size=4, block_bytes=100, max_running=4, max_step_tokens=64)


def loaded(core: EngineCore, digest: Digest, num_bytes: int) -> None:
    core.load_adapter(digest, "d")
    core.adapter_actions()
    core.adapter_loaded(digest, num_bytes, 0.0)


def finish(core: EngineCore, limit: int = 200) -> int:
    """Step until nothing can run; returns the number of steps."""
    steps = 0
    for _ in range(limit):
        core.adapter_actions()
        batch = core.schedule(0.0)
        core.check()
        if batch is None:
            if not core.has_errands:
                return steps
            continue
        steps += 1
        core.commit(batch, [SampledToken(5) for item in batch.items if item.is_sampled], 0.0)
    raise AssertionError("it never ends")


def test_an_adapter_takes_blocks_and_gives_them_back() -> None:
    core = EngineCore(info(), CONFIG)
    loaded(core, A, 250)
    assert core.blocks.num_usable == 7
    core.unload_adapter(A)
    assert core.adapter_actions() == [FreeAdapter(A)]
    assert core.blocks.num_usable == 10
    core.check()


def test_whoever_waits_for_blocks_gets_those_of_an_adapter_nobody_needs() -> None:
    core = EngineCore(info(), CONFIG)
    loaded(core, A, 400)
    core.add(make_request("r", list(range(3, 23)), max_tokens=12, ignore_eos=True), 1, (), 0.0)
    assert core.schedule(0.0) is None
    assert core.has_errands
    assert finish(core) > 0
    assert core.blocks.num_usable == 10
    assert core.load.num_waiting == core.load.num_running == 0


def test_a_request_larger_than_what_its_own_adapter_leaves_still_runs() -> None:
    core = EngineCore(info(), CONFIG)
    loaded(core, A, 900)
    request = make_request("r", list(range(3, 23)), max_tokens=12, ignore_eos=True, adapter_digest=A)
    core.add(request, 1, (), 0.0)
    assert finish(core) > 0
    assert core.load.num_waiting == core.load.num_running == 0


def test_what_running_sequences_will_need_is_never_lent() -> None:
    core = EngineCore(info(), CONFIG)
    core.add(make_request("r", list(range(3, 19)), max_tokens=16, ignore_eos=True), 1, (), 0.0)
    batch = core.schedule(0.0)
    assert batch is not None
    core.commit(batch, [SampledToken(5)], 0.0)
    loaded(core, B, 900)
    assert core.blocks.num_usable >= 8, "16 + 15 positions in blocks of 4"
    finish(core)
    assert core.scheduler.num_preemptions == 0


def test_lent_blocks_are_the_last_ones_and_cached_prefixes_go_after_empty_ones() -> None:
    blocks = BlockManager(4, 4)
    assert blocks.lend(3) == 3
    assert blocks._empty == [0]
    assert blocks.lend(5) == 1
    blocks.take_back(4)
    assert blocks._empty == [3, 2, 1, 0]


def test_memory_comes_back_when_its_last_tensor_goes_and_is_lent_again() -> None:
    memory = AdapterMemory()
    memory.prepare(1000)
    assert memory.spare_bytes >= 1000
    piece = memory.take(1000)
    address, view = piece.data_ptr(), piece[:4].view(torch.int32)
    del piece
    gc.collect()
    assert memory.spare_bytes == 0, "a view still lives"
    del view
    gc.collect()
    assert memory.take(900).data_ptr() == address

"""Moving to the host or computing again: decided by cost, and the tokens are the same either way."""

from typing import Any

import pytest

from nearline.engine import EngineConfig
from nearline.engine.block_manager import BlockManager
from nearline.engine.sequence import Sequence
from nearline.engine.swap import HostArea
from nearline.protocol import RequestId
from nearline.protocol.errors import ErrorInfo
from tests.engine.fake_engine import Engine, info, make_request, solo
from tests.engine.timed_engine import LAW


def sequence(num_computed: int, blocks: BlockManager) -> Sequence:
    one = Sequence(make_request("r", [1] * (num_computed + 1)), 1, [1] * (num_computed + 1), 0.0)
    assert blocks.extend(one, num_computed) == []
    one.num_computed = num_computed
    return one


def area(num_host_blocks: int, block_copy_s: float) -> tuple[HostArea, BlockManager]:
    config = EngineConfig(
        num_blocks=64,
        block_size=16,
        num_host_blocks=num_host_blocks,
        block_bytes=1000,
        copy_bytes_per_s=1000 / block_copy_s,
    )
    return HostArea(config), BlockManager(64, 16)


@pytest.mark.parametrize(("num_computed", "block_copy_s", "pays"), [
    (100, 0.0025, True),  # 7 blocks there and back in 35 ms; the law's prefill of 100 takes 36.2 ms
    (100, 0.0026, False),
    (1000, 0.001, True),
])  # fmt: skip
def test_it_pays_when_both_ways_are_quicker_than_the_prefill(
    num_computed: int, block_copy_s: float, pays: bool
) -> None:
    host, blocks = area(64, block_copy_s)
    num_blocks = -(-num_computed // 16)
    assert (2 * num_blocks * block_copy_s < LAW.prefill_s(num_computed)) == pays
    assert host.pays(sequence(num_computed, blocks), LAW) == pays


def test_without_room_or_anything_to_move_it_is_computed_again() -> None:
    host, blocks = area(6, 1e-9)
    assert not host.pays(sequence(100, blocks), LAW)
    assert host.pays(sequence(96, blocks), LAW)
    assert not host.pays(sequence(0, blocks), LAW)


def test_what_went_out_comes_back_and_nothing_is_held_twice() -> None:
    host, blocks = area(8, 1e-9)
    one = sequence(40, blocks)
    before = list(one.block_table)
    outs = host.swap_out(one, blocks)
    assert [device for device, _ in outs] == before
    assert (one.num_computed, one.num_swapped, host.num_used, blocks.num_used) == (0, 40, 3, 0)
    host.check([one])
    assert blocks.extend(one, 41) == []
    ins = host.swap_in(one)
    assert [hosted for hosted, _ in ins] == [hosted for _, hosted in outs]
    assert [device for _, device in ins] == one.block_table
    assert (one.num_computed, one.num_swapped, host.num_used) == (40, 0, 0)
    host.check([one])


def crowd(**config: Any) -> Engine:
    settings = {"num_blocks": 10, "future_share": 0.0, "max_step_tokens": 16, "checkpoint": info(num_bytes=10**8)}
    engine = Engine(**settings | config)
    requests = [make_request(name, [1 + i] * 6, max_tokens=14, ignore_eos=True) for i, name in enumerate("abcdef")]
    for request in requests:
        engine.add(request)
    engine.drain()
    assert engine.outputs == {f"{request.request_id}#1": solo(request) for request in requests}
    return engine


def test_tokens_are_the_same_swapped_or_computed_again() -> None:
    cheap, dear = crowd(num_host_blocks=20, copy_bytes_per_s=1e12), crowd(num_host_blocks=20, copy_bytes_per_s=1e-3)
    assert cheap.core.scheduler.num_preemptions > 0
    assert cheap.core.scheduler.host.num_swaps > 0
    assert dear.core.scheduler.host.num_swaps == 0
    assert dear.core.scheduler.num_preemptions > 0


def test_an_aborted_sequence_gives_its_host_blocks_back() -> None:
    engine = Engine(num_blocks=10, future_share=0.0, max_step_tokens=16, num_host_blocks=20, copy_bytes_per_s=1e12)
    for name in "abcdef":
        engine.add(make_request(name, [1] * 6, max_tokens=14, ignore_eos=True, salt=name))
    while not engine.core.scheduler.host.num_used:
        engine.step()
    (gone,) = [s for s in engine.core.scheduler.waiting if s.num_swapped][:1]
    engine.core.abort(gone.request.request_id, engine.tick())
    engine.core.check()
    engine.drain()
    assert engine.core.scheduler.host.num_used == 0


def test_what_goes_out_while_nobody_can_run_is_there_when_it_comes_back() -> None:
    engine = Engine(num_blocks=10, future_share=0.0, num_host_blocks=20, copy_bytes_per_s=1e12, is_prefix_cached=False)
    request = make_request("a", [1] * 6, max_tokens=30, ignore_eos=True)
    engine.add(request)
    engine.step()
    blocks = engine.core.blocks
    num_lent = blocks.lend(blocks.num_free)
    while engine.core.load.num_running:
        engine.step()
    assert engine.core.scheduler.host.num_used > 0
    blocks.take_back(num_lent)
    engine.drain()
    assert engine.outputs == {"a#1": solo(request)}


def test_nobody_gives_way_to_one_whose_turn_it_is_not() -> None:
    engine = Engine(max_running=1, num_host_blocks=20, copy_bytes_per_s=1e12)
    engine.add(make_request("a", [1] * 6, max_tokens=9, priority=1))
    engine.step()
    engine.core.yield_place(RequestId("a"))
    engine.add(make_request("b", [2] * 6, max_tokens=9))
    batch = engine.core.scheduler.schedule(engine.tick(), lambda sequence: sequence.request.request_id == "a")
    assert batch is not None
    assert [item.sequence.request.request_id for item in batch.items] == ["a"]


def test_who_went_out_in_a_step_that_failed_computes_again() -> None:
    engine = Engine(num_blocks=10, future_share=0.0, max_step_tokens=16, num_host_blocks=20, copy_bytes_per_s=1e12)
    requests = [make_request(name, [1 + i] * 6, max_tokens=14, ignore_eos=True) for i, name in enumerate("abcdef")]
    for request in requests:
        engine.add(request)
    batch = engine.core.schedule(engine.tick())
    while batch is not None and not batch.swap_outs:
        engine.note(engine.core.commit(batch, engine.device.run(batch), engine.tick()))
        batch = engine.core.schedule(engine.tick())
    assert batch is not None
    engine.core.scheduler.forget_moves(batch)
    failed = [item.sequence.request.request_id for item in batch.items]
    engine.core.fail(failed, ErrorInfo("internal_error", "no memory"), engine.tick())
    engine.core.check()
    engine.drain()
    rest = [request for request in requests if request.request_id not in failed]
    assert all(engine.outputs[f"{request.request_id}#1"] == solo(request) for request in rest)

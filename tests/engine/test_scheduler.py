"""Which tokens go into which step, by literal tables of (request, start, number of tokens)."""

from typing import Any

from nearline.engine import Batch
from tests.engine.fake_engine import Engine, make_request, solo


def rows(batch: Batch | None) -> list[tuple[str, int, int]]:
    return [] if batch is None else [(i.sequence.request.request_id, i.start, i.num_tokens) for i in batch.items]


def request(name: str, length: int, max_tokens: int = 3, **fields: Any) -> Any:
    base = sum(name.encode())
    prompt = [1 + (base + i) % 40 for i in range(length)]
    return make_request(name, prompt, max_tokens=max_tokens, ignore_eos=True, **fields)


def test_decodes_come_first_and_prompts_share_the_rest_of_the_budget() -> None:
    engine = Engine(num_blocks=64, max_step_tokens=8)
    engine.add(request("a", 5, 6))
    assert rows(engine.step()) == [("a", 0, 5)]
    engine.add(request("b", 10))
    engine.add(request("c", 3))
    assert rows(engine.step()) == [("a", 5, 1), ("b", 0, 7)]
    assert rows(engine.step()) == [("a", 6, 1), ("b", 7, 3), ("c", 0, 3)]
    assert rows(engine.step()) == [("a", 7, 1), ("b", 10, 1), ("c", 3, 1)]


def test_without_a_budget_prompts_are_never_cut() -> None:
    engine = Engine(num_blocks=64, max_step_tokens=None)
    for name, length in (("a", 50), ("b", 40)):
        engine.add(request(name, length))
    assert rows(engine.step()) == [("a", 0, 50), ("b", 0, 40)]


def test_chunked_and_unchunked_generate_the_same() -> None:
    requests = [request(name, length, 9) for name, length in (("a", 33), ("b", 1), ("c", 17), ("d", 8))]
    for budget in (5, 8, 13, None):
        engine = Engine(num_blocks=64, max_step_tokens=budget)
        for one in requests:
            engine.add(one)
        engine.drain()
        assert engine.outputs == {f"{one.request_id}#1": solo(one) for one in requests}


def test_the_smaller_priority_number_comes_first_then_the_earlier_arrival() -> None:
    engine = Engine(max_running=1)
    engine.add(request("running", 2))
    engine.step()
    for name, priority in (("late", 5), ("normal", 0), ("normal-2", 0), ("urgent", -1)):
        engine.add(request(name, 2, 1, priority=priority))
    order = []
    while batch := engine.step():
        order += [name for name, start, _ in rows(batch) if start == 0]
    assert order == ["urgent", "normal", "normal-2", "late"]


def test_no_more_than_max_running_decode_together() -> None:
    engine = Engine(max_running=2, num_blocks=64)
    for name in "abcd":
        engine.add(request(name, 2, 4))
    most = 0
    while batch := engine.step():
        most = max(most, len(batch.items))
    assert most == 2
    assert len(engine.ends) == 4


def test_one_that_does_not_fit_waits_and_keeps_its_place() -> None:
    engine = Engine(num_blocks=8, max_step_tokens=None)
    engine.add(request("large", 20, 9))  # 28 positions: 7 blocks
    engine.step()
    engine.add(request("second", 5, 4))  # 2 blocks, 1 is left
    engine.add(request("small", 2, 2))  # would fit, but comes later
    assert rows(engine.step()) == [("large", 20, 1)]
    while "large#1" not in engine.ends:
        assert [name for name, _, _ in rows(engine.step())] == ["large"]
    assert rows(engine.step()) == [("second", 0, 5), ("small", 0, 2)]


def test_admission_sees_that_one_will_have_ended_before_another_grows() -> None:
    """Final sizes add up to more blocks than there are, yet both run: the first ends before the second is large."""
    engine = Engine(num_blocks=7, max_step_tokens=None)
    engine.add(request("short", 11, 2))  # 12 positions, ends in one more step
    engine.step()
    engine.add(request("long", 3, 22))  # 24 positions: 6 blocks, 3 + 6 > 7
    assert [name for name, _, _ in rows(engine.step())] == ["short", "long"]
    engine.drain()
    assert engine.core.scheduler.num_preemptions == 0
    assert len(engine.ends) == 2


def overload(future_share: float) -> Engine:
    engine = Engine(num_blocks=10, future_share=future_share, max_step_tokens=16)
    for name in "abcdef":
        engine.add(request(name, 6, 14))
    engine.drain()
    assert engine.outputs == {f"{name}#1": solo(request(name, 6, 14)) for name in "abcdef"}
    return engine


def test_declared_lengths_mean_no_preemption_ever_and_without_them_it_happens() -> None:
    assert overload(future_share=1.0).core.scheduler.num_preemptions == 0
    assert overload(future_share=0.0).core.scheduler.num_preemptions > 0


def test_the_last_in_order_is_preempted_and_the_first_never() -> None:
    engine = Engine(num_blocks=10, future_share=0.0, max_step_tokens=16)
    for name in "abcdef":
        engine.add(request(name, 6, 14))
    preempted = []
    while True:
        before = [s.request.request_id for s in engine.core.scheduler.running]
        if engine.step() is None:
            break
        gone = {s.request.request_id for s in engine.core.scheduler.waiting} & set(before)
        come = {s.request.request_id for s in engine.core.scheduler.running} - set(before)
        assert not (gone and come), "the room of a preempted sequence was given away in the same step"
        assert sorted(gone) == before[len(before) - len(gone) :]
        preempted += sorted(gone)
    assert preempted
    assert "a" not in preempted


def test_a_long_prompt_never_delays_decoding_by_more_than_one_step() -> None:
    engine = Engine(num_blocks=64, max_running=4, max_step_tokens=8)
    engine.add(request("stream", 2, 20))
    engine.step()
    engine.add(request("huge", 50, 2))
    while "stream#1" not in engine.ends:
        batch = engine.step()
        assert batch is not None
        assert ("stream", 1) in [(name, count) for name, _, count in rows(batch)]
        assert sum(count for _, _, count in rows(batch)) <= 8


def test_a_sequence_without_its_adapter_does_not_hold_up_the_others() -> None:
    engine = Engine(num_blocks=64)
    engine.core.load_adapter("x", "/x")
    engine.core.adapter_actions()
    engine.add(request("adapted", 4, adapter_digest="x"))
    engine.add(request("base", 4))
    assert [name for name, _, _ in rows(engine.step())] == ["base"]
    engine.core.adapter_loaded("x", 1, engine.tick())
    assert sorted(name for name, _, _ in rows(engine.step())) == ["adapted", "base"]
    engine.drain()
    assert len(engine.ends) == 2

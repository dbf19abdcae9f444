"""A sequence told to give way stays in the engine, lets whoever stands before it pass, and goes on token for token."""

from pathlib import Path
from typing import Any

import pytest

from nearline.protocol import RequestId
from nearline.protocol.frames import StepDone, Submit, Yield
from tests.engine.checkpoints import Oracle
from tests.engine.engine_process import INSTANCE, EngineUnderTest
from tests.engine.fake_engine import Engine, make_request, solo

BATCH, URGENT = 10_000, 0
NUM_PLACES, KV_BYTES = 8, 8 << 20


def request(name: str, length: int, max_tokens: int, priority: int) -> Any:
    prompt = [1 + (sum(name.encode()) + i) % 40 for i in range(length)]
    return make_request(name, prompt, max_tokens=max_tokens, ignore_eos=True, priority=priority)


@pytest.mark.parametrize("host", [{}, {"num_host_blocks": 32, "copy_bytes_per_s": 1e12}])
def test_it_gives_way_at_the_next_step_and_generates_the_same_in_the_end(host: dict[str, float]) -> None:
    engine = Engine(max_running=2, num_blocks=64, **host)
    long = [request(name, 9, 20, BATCH) for name in ("a", "b")]
    for one in long:
        engine.add(one)
    for _ in range(6):
        engine.step()
    engine.core.yield_place(RequestId("b"))
    engine.add(request("now", 5, 4, URGENT))
    engine.step()
    assert [s.request.request_id for s in engine.core.scheduler.running] == ["now", "a"]
    assert [s.request.request_id for s in engine.core.scheduler.waiting] == ["b"]
    engine.drain()
    assert engine.outputs["b#1"] == solo(long[1])
    assert engine.outputs["a#1"] == solo(long[0])
    assert len(engine.ends) == 3


def test_it_keeps_its_place_while_nobody_stands_before_it_and_gives_way_once_only() -> None:
    engine = Engine(max_running=1, num_blocks=64)
    engine.add(request("a", 5, 20, BATCH))
    engine.step()
    engine.step()
    engine.core.yield_place(RequestId("a"))
    engine.add(request("later", 5, 3, BATCH))
    for _ in range(3):
        engine.step()
    assert [s.request.request_id for s in engine.core.scheduler.running] == ["a"], "an equal stands behind it"
    engine.add(request("now", 3, 3, URGENT))
    engine.step()
    assert [s.request.request_id for s in engine.core.scheduler.running] == ["now"]
    while "now#1" not in engine.ends:
        engine.step()
    engine.step()
    engine.add(request("again", 3, 3, URGENT))
    engine.step()
    assert [s.request.request_id for s in engine.core.scheduler.running] == ["a"], "told once, it gives way once"


def test_a_real_engine_lets_a_batch_answer_give_way_and_both_equal_transformers(
    checkpoints: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    engine = EngineUnderTest("--step-tokens", "40")
    engine.bind(checkpoints["a"], kv_bytes=KV_BYTES)
    prompts = {f"b{n}": [5 + n, 9, 11 * n + 1] for n in range(NUM_PLACES)}
    batch = [make_request(name, p, max_tokens=60, ignore_eos=True, priority=BATCH) for name, p in prompts.items()]
    engine.submit(*batch)
    engine.expect(StepDone, where=lambda step: step.num_running == NUM_PLACES)
    urgent = make_request("now", [1, 2, 3], max_tokens=12, ignore_eos=True, priority=URGENT)
    engine.send(Yield(INSTANCE, RequestId("b1")), Submit(INSTANCE, urgent, 1))
    assert engine.outcome(RequestId("now"))[0] == oracles["a"]([1, 2, 3])
    assert all(update.finish_reason is None for update in engine.updates(RequestId("b1")))
    for name, prompt in prompts.items():
        assert engine.outcome(RequestId(name))[0] == oracles["a"](prompt, 60)
    engine.unbind()
    engine.close()
    assert engine.exit_code() == 0

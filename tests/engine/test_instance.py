"""A bound model without its process: what the engine's habits may change, and the one thing they may not, tokens."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nearline.checkpoint_store import read_manifest
from nearline.engine import PolicyName
from nearline.engine.instance import BoundInstance, EngineHabits
from nearline.loader import MappedPool
from nearline.protocol import Digest, InstanceSpec, ModelId, RequestId
from nearline.protocol.frames import Bind, PoolLayout
from tests.engine.checkpoints import Oracle
from tests.engine.engine_process import FRAME_BYTES, INSTANCE, NUM_FRAMES, Pool
from tests.engine.fake_engine import make_request

Bound = Callable[..., BoundInstance]


@pytest.fixture
def bind(checkpoints: dict[str, Path]) -> Iterator[Bound]:
    bound: list[BoundInstance] = []

    def make(num_blocks: int | None = None, **habits: Any) -> BoundInstance:
        pool, directory = Pool(), checkpoints["a"]
        frames = pool.take(directory)
        pool.fill(directory, frames)
        mapped = MappedPool(pool.fd, pool.ready_fd, PoolLayout(NUM_FRAMES, FRAME_BYTES))
        spec = InstanceSpec(INSTANCE, ModelId("m"), Digest(directory.name))
        kv_bytes = 1 << 20
        if num_blocks is not None:
            kv_bytes = num_blocks * 16 * read_manifest(directory).info.kv_bytes_per_token
        order = Bind(spec, str(directory / "manifest.json"), frames, kv_bytes, 8, 1)
        bound.append(BoundInstance(order, mapped, EngineHabits(**habits)))
        return bound[-1]

    yield make
    for instance in bound:
        instance.close()


def generate(instance: BoundInstance, prompts: list[list[int]], prefix: str) -> tuple[list[list[int]], int]:
    """Run prompts together; return their tokens and how many of theirs came from the prefix cache."""
    outputs: dict[str, list[int]] = {f"{prefix}{i}": [] for i in range(len(prompts))}
    cached = 0
    for name, prompt in zip(outputs, prompts, strict=True):
        instance.core.add(make_request(name, prompt, max_tokens=12, ignore_eos=True), 1, (), time.monotonic())
    while (updates := instance.step(time.monotonic)) is not None:
        instance.core.check()
        for update in updates:
            assert update.error is None
            outputs[update.request_id] += update.token_ids
            cached += update.timings.num_cached_tokens if update.timings else 0
    return list(outputs.values()), cached


HABITS: list[dict[str, Any]] = [
    {},
    {"is_prefix_cached": False},
    {"step_tokens": 17},
    {"step_tokens": None, "is_prefix_cached": False},
]


@pytest.mark.parametrize("habits", HABITS, ids=str)
def test_prefix_cache_and_chunks_change_no_token_in_float32(
    bind: Bound, oracles: dict[str, Oracle], habits: dict[str, Any]
) -> None:
    shared = [(7 * i) % 256 for i in range(64)]
    prompts = [[*shared[:48], 5, 6], shared, [*shared, 1], shared[:32], shared[:33] + [9] * 40, shared]
    expected = [oracles["a"](prompt) for prompt in prompts]
    instance = bind(**habits)
    for i, prompt in enumerate(prompts):
        assert generate(instance, [prompt], f"alone{i}-")[0] == [expected[i]]
    together, cached = generate(instance, prompts, "together")
    assert together == expected
    assert (cached > 200) == habits.get("is_prefix_cached", True)


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
@pytest.mark.parametrize("policy", PolicyName)
def test_preempted_sequences_go_on_token_for_token_swapped_or_computed_again(
    bind: Bound, oracles: dict[str, Oracle], policy: PolicyName, swap_bytes: int
) -> None:
    """More than the KV cache holds at once, admitted all the same."""
    instance = bind(
        num_blocks=8, policy=policy, future_share=0.0, swap_bytes=swap_bytes, is_prefix_cached=False, step_tokens=64
    )
    prompts = [[(5 * i + 3 * j) % 256 for j in range(20 + i)] for i in range(7)]
    assert generate(instance, prompts, "crowd")[0] == [oracles["a"](prompt) for prompt in prompts]
    scheduler = instance.core.scheduler
    assert scheduler.num_preemptions > 0
    assert (scheduler.host.num_swaps > 0) == (swap_bytes > 0)


def test_a_step_that_fails_unforeseen_ends_its_sequences_and_the_next_ones_run(
    bind: Bound, oracles: dict[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = bind()
    now = time.monotonic()
    instance.core.add(make_request("doomed", [1, 2], max_tokens=3), 1, (), now)
    with monkeypatch.context() as broken:
        broken.setattr(instance._runner, "run", lambda batch: 1 / 0)
        updates = instance.step(time.monotonic)
    assert updates is not None
    assert [(u.request_id, u.error.code if u.error else None) for u in updates] == [("doomed", "internal_error")]
    assert generate(instance, [[1, 2, 3]], "next")[0] == [oracles["a"]([1, 2, 3])]


def test_a_chunk_that_fails_before_it_is_sampled_ends_its_sequence_alone(
    bind: Bound, oracles: dict[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks hold no keys and values, so nobody may find them in the prefix cache either."""
    instance, prompt = bind(step_tokens=20), [(3 * i) % 256 for i in range(60)]
    step = instance._runner._step

    def fail_on_long(items: Any) -> Any:
        if any(item.sequence.request.request_id == "long" for item in items):
            raise RuntimeError("no such kernel")
        return step(items)

    now = time.monotonic()
    with monkeypatch.context() as broken:
        broken.setattr(instance._runner, "_step", fail_on_long)
        instance.core.add(make_request("short", [4], max_tokens=12, ignore_eos=True), 1, (), now)
        instance.core.add(make_request("long", prompt, max_tokens=12), 1, (), now)
        updates = instance.step(time.monotonic) or []
    assert {u.request_id: u.error.code if u.error else "" for u in updates} == {"short": "", "long": "internal_error"}
    assert instance.core.abort(RequestId("short"), time.monotonic())
    assert generate(instance, [prompt], "again")[0] == [oracles["a"](prompt)]

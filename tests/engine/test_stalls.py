"""The real SmolLM2-135M: a long prompt beside running streams raises no gap above twice the target between tokens."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.engine.instance import BoundInstance, EngineHabits
from nearline.loader import MappedPool
from nearline.protocol import CheckpointKind, Digest, InstanceSpec, ModelId, SequenceUpdate, StepProfile, TaskId
from nearline.protocol.errors import ErrorInfo
from nearline.protocol.frames import Bind, PoolLayout, ProfileFinished, ProfileInstance
from tests.engine.engine_process import FRAME_BYTES, INSTANCE, Pool
from tests.engine.fake_engine import make_request

TPOT_S = 0.1
Make = Callable[..., BoundInstance]
NUM_FRAMES = 32


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Path:
    root = tmp_path_factory.mktemp("stalls")
    info = import_checkpoint(root, CheckpointKind.MODEL, str(smollm2_gguf))
    return root / "checkpoints" / info.digest


@pytest.fixture
def bind(directory: Path) -> Iterator[Make]:
    bound: list[BoundInstance] = []

    def make(profile: StepProfile | None = None, step_tokens: int | None = 512) -> BoundInstance:
        pool = Pool(NUM_FRAMES)
        frames = pool.take(directory)
        pool.fill(directory, frames)
        mapped = MappedPool(pool.fd, pool.ready_fd, PoolLayout(NUM_FRAMES, FRAME_BYTES))
        spec = InstanceSpec(INSTANCE, ModelId("m"), Digest(directory.name))
        order = Bind(spec, str(directory / "manifest.json"), frames, 1 << 28, 8, 2, profile)
        bound.append(BoundInstance(order, mapped, EngineHabits(tpot_s=TPOT_S, step_tokens=step_tokens)))
        return bound[-1]

    yield make
    for instance in bound:
        instance.close()


def longest_gap(instance: BoundInstance) -> float:
    """Four streams decode; a prompt of 2,000 tokens arrives in the middle of them."""
    last: dict[str, float] = {}
    gaps: list[float] = []

    def step() -> list[SequenceUpdate]:
        updates = instance.step(time.monotonic) or []
        now = time.monotonic()
        for update in updates:
            if update.request_id in last:
                gaps.append(now - last[update.request_id])
            last[update.request_id] = now
        return updates

    for i in range(4):
        prompt = [(i + 7 * j) % 900 + 10 for j in range(100)]
        instance.core.add(make_request(f"s{i}", prompt, max_tokens=400, ignore_eos=True), 1, (), time.monotonic())
    for _ in range(40):
        step()
    gaps.clear()
    huge = [(11 * j) % 900 + 10 for j in range(2000)]
    instance.core.add(make_request("huge", huge, max_tokens=2), 1, (), time.monotonic())
    while not any(update.request_id == "huge" and update.finish_reason for update in step()):
        pass
    instance.core.fail_all(ErrorInfo("cancelled", "measured"), time.monotonic())
    return max(gaps)


@pytest.mark.slow
def test_learning_as_it_goes_and_with_a_profile_gaps_stay_below_twice_the_target(bind: Make) -> None:
    instance = bind()
    assert longest_gap(instance) < 2 * TPOT_S
    profiler = instance.profiler(ProfileInstance(TaskId("t"), INSTANCE))
    while not isinstance(said := profiler.advance(), ProfileFinished):
        pass
    assert max(said.profile.prefill_error, said.profile.decode_error) < 0.3
    assert longest_gap(bind(said.profile)) < 2 * TPOT_S


@pytest.mark.slow
def test_an_uncut_prompt_stalls_them(bind: Make) -> None:
    assert longest_gap(bind(step_tokens=None)) > 2 * TPOT_S

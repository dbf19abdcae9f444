"""Adapters that come, go and are replaced under traffic: whoever shares the engine, each gets peft's tokens."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.engine import EngineCore, FreeAdapter
from nearline.engine.adapter_memory import AdapterMemory
from nearline.engine.config import MergeMode
from nearline.engine.instance import BoundInstance, EngineHabits
from nearline.loader import MappedPool
from nearline.protocol import CheckpointKind, Digest, InstanceSpec, ModelId, RequestId, SequenceUpdate
from nearline.protocol.errors import ErrorInfo
from nearline.protocol.frames import Bind, PoolLayout
from tests.engine.checkpoints import Oracle
from tests.engine.engine_process import FRAME_BYTES, INSTANCE, NUM_FRAMES, Pool
from tests.engine.fake_engine import make_request

SHARED = [(11 * i) % 256 for i in range(70)]
FORMS: dict[str, dict[str, Any]] = {
    "A": {"r": 4}, "B": {"r": 16, "use_rslora": True}, "C": {"r": 2, "use_dora": True}, "D": {"r": 8},
}  # fmt: skip


class Life:
    """A bound model and its adapters; every read happens between two steps, as slowly as the test wants."""

    def __init__(self, instance: BoundInstance, directories: dict[str, Path]) -> None:
        self.instance, self.directories = instance, directories
        self.memory = AdapterMemory()
        self.reads: list[str] = []
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, SequenceUpdate] = {}

    def digest(self, name: str | None) -> Digest | None:
        return None if name is None else Digest(self.directories[name].name)

    def announce(self, name: str) -> None:
        self.instance.core.load_adapter(Digest(self.directories[name].name), str(self.directories[name]))

    def retire(self, name: str) -> None:
        self.instance.core.unload_adapter(Digest(self.directories[name].name))

    def submit(self, request_id: str, name: str | None, prompt: list[int], max_tokens: int = 12) -> None:
        one = make_request(request_id, prompt, max_tokens=max_tokens, ignore_eos=True, adapter_digest=self.digest(name))
        self.tokens[request_id] = []
        self.hear(self.instance.core.add(one, 1, (), time.monotonic()))

    def tend(self) -> None:
        for action in self.instance.core.adapter_actions():
            if isinstance(action, FreeAdapter):
                self.instance.free_adapter(action.digest)
                continue
            self.reads.append(action.digest)
            try:
                num_bytes = self.instance.read_adapter(action.digest, action.directory)(self.memory)
            except Exception as error:
                self.hear(self.instance.core.adapter_failed(action.digest, ErrorInfo.of(error), time.monotonic()))
            else:
                self.instance.core.adapter_loaded(action.digest, num_bytes, time.monotonic())

    def step(self) -> bool:
        self.tend()
        updates = self.instance.step(time.monotonic)
        self.instance.core.check()
        self.hear(updates or [])
        return updates is not None

    def drain(self) -> None:
        while self.step():
            pass
        self.tend()

    def hear(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            self.tokens[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                self.ends[update.request_id] = update

    def resident(self) -> set[str]:
        return {name for name, path in self.directories.items() if path.name in self.instance._runner.adapters.digests}


@pytest.fixture(scope="module")
def adapters(
    sources: dict[str, Path], checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Path], dict[str | None, Oracle]]:
    """Four adapters of model a, imported, and what peft says of each (None: the base)."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    made: dict[str, Path] = {}
    oracles: dict[str | None, Oracle] = {None: Oracle(sources["a"])}
    for seed, (name, form) in enumerate(FORMS.items()):
        torch.manual_seed(seed)
        config = LoraConfig(lora_alpha=16, target_modules="all-linear", init_lora_weights=False, **form)
        source = tmp_path_factory.mktemp("peft") / name
        get_peft_model(AutoModelForCausalLM.from_pretrained(sources["a"]), config).save_pretrained(str(source))
        root = checkpoints["a"].parent.parent
        digest = import_checkpoint(root, CheckpointKind.ADAPTER, str(source), Digest(checkpoints["a"].name)).digest
        made[name] = root / "checkpoints" / digest
        oracles[name] = Oracle(sources["a"], source)
    return made, oracles


@pytest.fixture
def live(checkpoints: dict[str, Path], adapters: tuple[dict[str, Path], Any]) -> Iterator[Callable[..., Life]]:
    bound: list[BoundInstance] = []

    def make(max_adapters: int = 8, merge: MergeMode = MergeMode.NEVER) -> Life:
        pool, directory = Pool(), checkpoints["a"]
        frames = pool.take(directory)
        pool.fill(directory, frames)
        mapped = MappedPool(pool.fd, pool.ready_fd, PoolLayout(NUM_FRAMES, FRAME_BYTES))
        spec = InstanceSpec(INSTANCE, ModelId("m"), Digest(directory.name))
        instance = BoundInstance(
            Bind(spec, str(directory / "manifest.json"), frames, 4 << 20, 20, 1),
            mapped,
            EngineHabits(step_tokens=64, merge=merge),
        )
        bound.append(instance)
        config = replace(instance.core.config, max_adapters=max_adapters)
        instance.core = EngineCore(instance._loaded.manifest.info, config)
        return Life(instance, dict(adapters[0]))

    yield make
    for instance in bound:
        instance.close()


def test_loading_replacing_and_unloading_others_changes_no_token_of_a_running_sequence(
    live: Callable[..., Life], adapters: tuple[Any, dict[str | None, Oracle]]
) -> None:
    life, oracles = live(max_adapters=3), adapters[1]
    life.announce("A")
    life.submit("long", "A", SHARED, max_tokens=120)
    wanted = {}
    for turn in range(40):
        name = "BCD"[turn % 3]
        life.announce(name)
        life.submit(f"{name}{turn}", name, [*SHARED[:40], turn], max_tokens=2)
        wanted[f"{name}{turn}"] = oracles[name]([*SHARED[:40], turn], 2)
        for _ in range(3):
            life.step()
        life.retire(name)
    life.drain()
    assert life.tokens["long"] == oracles["A"](SHARED, 120)
    assert {request: life.tokens[request] for request in wanted} == wanted
    assert len(life.reads) >= 40, "the others were loaded again and again"
    assert life.resident() == {"A"}


def test_a_replaced_adapter_answers_new_requests_and_the_prefix_cache_keeps_them_apart(
    live: Callable[..., Life], adapters: tuple[Any, dict[str | None, Oracle]]
) -> None:
    life, oracles = live(), adapters[1]
    life.announce("A")
    life.submit("v1", "A", SHARED, max_tokens=30)
    for _ in range(6):
        life.step()
    life.announce("B")  # what the platform does for a new version: another digest, then the old one goes
    life.submit("v2", "B", SHARED)
    life.retire("A")
    life.submit("base", None, SHARED)
    life.drain()
    life.submit("v2 again", "B", SHARED)
    life.drain()
    assert life.tokens["v1"] == oracles["A"](SHARED, 30), "it finishes on the weights it began with"
    assert life.tokens["v2"] == life.tokens["v2 again"] == oracles["B"](SHARED)
    assert life.tokens["base"] == oracles[None](SHARED)
    life.submit("late", "A", SHARED)
    error = life.ends["late"].error
    assert error is not None
    assert error.code == "not_found", "never the base's answer"


@pytest.mark.parametrize("max_adapters", [1, 2])
def test_more_adapters_than_places_take_turns(
    max_adapters: int, live: Callable[..., Life], adapters: tuple[Any, dict[str | None, Oracle]]
) -> None:
    life, oracles = live(max_adapters), adapters[1]
    for name in FORMS:
        life.announce(name)
    wanted = {}
    for turn in range(12):
        name, prompt = "ABCD"[turn % 4], [*SHARED[:20], turn]
        life.submit(f"r{turn}", name, prompt, max_tokens=5)
        wanted[f"r{turn}"] = oracles[name](prompt, 5)
        life.step()
        assert len(life.resident()) <= max_adapters
    life.drain()
    assert life.tokens == wanted


def test_sixteen_mixed_sequences_that_join_and_leave_equal_each_alone(
    live: Callable[..., Life], adapters: tuple[Any, dict[str | None, Oracle]]
) -> None:
    life, oracles, draw = live(), adapters[1], random.Random(4)
    for adapter in FORMS:
        life.announce(adapter)
    names: list[str | None] = ["A", "B", None, "C", "D", "A", None, "B"] * 2
    wanted = {}
    for index, name in enumerate(names):
        prompt, num_tokens = SHARED[: draw.randint(1, 70)], draw.randint(1, 20)
        life.submit(f"r{index}", name, prompt, num_tokens)
        wanted[f"r{index}"] = oracles[name](prompt, num_tokens)
        if index % 3:
            life.step()
    life.drain()
    assert life.tokens == wanted


def test_fifty_first_requests_read_their_adapter_once(live: Callable[..., Life]) -> None:
    life = live()
    life.announce("C")
    for index in range(50):
        life.submit(f"r{index}", "C", [index + 1], max_tokens=1)
    life.drain()
    assert life.reads == [life.digest("C")]
    assert len(life.ends) == 50


def test_an_adapter_deleted_from_disk_fails_its_requests_alone(
    live: Callable[..., Life], adapters: tuple[Any, dict[str | None, Oracle]], tmp_path: Path
) -> None:
    life, oracles = live(), adapters[1]
    life.directories["gone"] = tmp_path / ("e" * 32)
    for adapter in ("A", "gone"):
        life.announce(adapter)
    for index, name in enumerate(["A", "gone", None, "gone"]):
        life.submit(f"{name}{index}", name, SHARED[:9])
    life.drain()
    assert [life.ends[name].error is not None for name in ("A0", "gone1", "None2", "gone3")] == [0, 1, 0, 1]
    assert (life.tokens["A0"], life.tokens["gone1"]) == (oracles["A"](SHARED[:9]), [])
    assert life.tokens["None2"] == oracles[None](SHARED[:9])


def test_random_loads_unloads_aborts_and_requests_leave_exactly_what_is_registered(
    live: Callable[..., Life], adapters: tuple[Any, dict[str | None, Oracle]]
) -> None:
    life, oracles, draw = live(max_adapters=2), adapters[1], random.Random(8)
    known: set[str] = set()
    expected, prompt = {name: oracles[name](SHARED[:12], 6) for name in FORMS}, SHARED[:12]
    for turn in range(250):
        name = draw.choice(sorted(FORMS))
        match draw.choice(["announce", "retire", "submit", "submit", "abort", "step", "step"]):
            case "announce":
                life.announce(name)
                known.add(name)
            case "retire":
                life.retire(name)
                known.discard(name)
            case "submit":
                life.submit(f"{name}{turn}", name, prompt, max_tokens=6)
            case "abort":
                request = draw.choice([*life.tokens, ""])
                if request not in life.ends and life.instance.core.abort(RequestId(request), time.monotonic()):
                    del life.tokens[request]
            case _:
                life.step()
    life.drain()
    for request, tokens in life.tokens.items():
        error = life.ends[request].error
        assert (error.code == "not_found" and tokens == []) if error else tokens == expected[request[0]]
    assert sum(end.error is None for end in life.ends.values()) > 30
    assert life.resident() <= known
    for name in sorted(known):
        life.retire(name)
    life.drain()
    assert life.resident() == set()
    assert life.instance._runner.adapters.num_bytes == 0


@pytest.mark.slow
def test_a_minute_of_alternating_adapters_over_a_shared_prefix_changes_no_token(
    live: Callable[..., Life], adapters: tuple[dict[str, Path], Any]
) -> None:
    """Two adapters in turn every few milliseconds over one long prefix; others are loaded and unloaded between."""
    oracles, life = adapters[1], live(max_adapters=3)
    prefix = [3 + (7 * i) % 250 for i in range(480)]
    draw, wanted, index = random.Random(0), {}, 0
    expected = {name: oracles[name](prefix, 6) for name in "AB"}
    for name in "AB":
        life.announce(name)
    ends_at = time.monotonic() + 60.0
    while time.monotonic() < ends_at:
        name = "AB"[index % 2]
        life.submit(f"{name}{index}", name, prefix, max_tokens=6)
        wanted[f"{name}{index}"] = expected[name]
        if index % 3 == 0:
            other = draw.choice("CD")
            life.announce(other)
            life.submit(f"{other}{index}", other, prefix[:40], max_tokens=2)
            life.step()
            life.retire(other)
        until = time.monotonic() + 0.008
        while time.monotonic() < until and life.step():
            pass
        index += 1
        if len(life.tokens) - len(life.ends) > 12:
            life.drain()
    life.drain()
    assert index > 100
    assert {request_id: life.tokens[request_id] for request_id in wanted} == wanted

"""Merged steps in a bound engine: made beside others' steps, undone without a trace, the same tokens for everybody."""

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nearline.engine.config import MergeMode
from nearline.engine.merge_meter import MergeMeter
from nearline.engine.merge_turns import merge_refusal, num_merged_copies
from nearline.engine.merging import MergeCosts
from nearline.engine.models.lora import AdapterRun
from nearline.engine.models.merged import MergedDecoder
from nearline.kernels import AttentionMeta
from tests.engine.test_adapter_life import SHARED, Life, adapters, live

__all__ = ["adapters", "live"]


def bit_images(life: Life) -> list[torch.Tensor]:
    """The base's weights, copied."""
    return [
        tensor.clone()
        for layer in life.instance._runner.decoder.layers
        for tensor in (layer.qkv_NM, layer.o_MN, layer.gate_up_NM, layer.down_MF)
    ]


@pytest.fixture
def run(live: Callable[..., Life]) -> Callable[..., Life]:
    """A life in which A decodes long, B joins and leaves, and all end; every step's mode is written down."""

    def make(merge: MergeMode, names: str = "AAAB", **config: Any) -> Life:
        life = live(merge=merge, **config)
        life.modes: list[str] = []  # type: ignore[misc]
        runner = life.instance._runner
        plain_run = runner.run

        def noting(batch: Any) -> Any:
            life.modes.append("-" if batch.merged is None else "m")  # type: ignore[attr-defined]
            return plain_run(batch)

        runner.run = noting
        for index, name in enumerate(names):
            life.announce(name)
            life.submit(f"{name}{index}", name, [*SHARED[:20], index], max_tokens=60 if name == "A" else 8)
        life.drain()
        return life

    return make


def test_always_merged_tokens_are_those_of_each_adapter_alone(run: Callable[..., Life], adapters: Any) -> None:
    together = run(MergeMode.ALWAYS, "AABC")
    assert "m" in together.modes  # type: ignore[attr-defined]
    for index, name in enumerate("AABC"):
        request_id = f"{name}{index}"
        alone = run(MergeMode.ALWAYS, "A" * index + name)
        assert together.tokens[request_id] == alone.tokens[request_id]
        num_tokens = 60 if name == "A" else 8
        assert together.tokens[request_id] == adapters[1][name]([*SHARED[:20], index], num_tokens)


def test_auto_merges_the_steps_of_the_adapter_that_is_alone_and_lets_the_others_in(
    run: Callable[..., Life], adapters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearline.engine.merge_turns._COPY_BYTES_PER_S", 1e15)
    life = run(MergeMode.AUTO, "AAAAAAAAAAAB")
    modes = life.modes  # type: ignore[attr-defined]
    assert "m" in modes
    assert "-" in modes
    for index, name in enumerate("AAAAAAAAAAAB"):
        # In float32 the roundings are too small to change a token of these prompts.
        expected = adapters[1][name]([*SHARED[:20], index], 60 if name == "A" else 8)
        assert life.tokens[f"{name}{index}"] == expected


def test_auto_a_copy_that_has_not_quite_paid_for_itself_is_made_while_nothing_runs(
    run: Callable[..., Life], adapters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MergeMeter, "costs", property(lambda _: MergeCosts(saving_s=1.0, merge_s=200.0)))
    life = run(MergeMode.AUTO, "A")
    assert set(life.modes) == {"-"}  # type: ignore[attr-defined]
    assert life.instance.core.kept_copies == (life.digest("A"),)
    life.modes.clear()  # type: ignore[attr-defined]
    life.submit("again", "A", [*SHARED[:20], 0], max_tokens=60)
    life.drain()
    assert set(life.modes) == {"m"}  # type: ignore[attr-defined]
    assert life.tokens["again"] == adapters[1]["A"]([*SHARED[:20], 0], 60)


def test_a_copy_is_made_layer_by_layer_and_leaves_the_base_as_it_was(run: Callable[..., Life]) -> None:
    life = run(MergeMode.NEVER, "A")
    runner, before = life.instance._runner, bit_images(life)
    calls = 0

    def no() -> bool:
        nonlocal calls
        calls += 1
        return False

    while not runner.merge(life.digest("A"), no):
        pass
    assert calls == runner.spec.num_layers, "one layer a call when there is no time"
    merged = runner._merged.decoder(life.digest("A"))
    assert merged is not runner.decoder
    assert all(torch.equal(one, two) for one, two in zip(before, bit_images(life), strict=True))
    first = merged.layers[0].qkv_NM
    assert not torch.equal(first, runner.decoder.layers[0].qkv_NM)
    life.announce("B")
    life.tend()
    while not runner.merge(life.digest("B"), no):
        pass
    assert runner._merged.decoder(life.digest("B")).layers[0].qkv_NM.data_ptr() == first.data_ptr(), "one copy's memory"
    assert runner._merged.decoder(None) is runner.decoder


def test_copies_that_are_kept_stay_as_they_are_beside_the_next(run: Callable[..., Life]) -> None:
    life = run(MergeMode.NEVER, "AB")
    runner = life.instance._runner
    for name in "AB":
        life.announce(name)
    life.tend()
    assert runner.merge(life.digest("A"), lambda: True)
    ours = runner._merged.decoder(life.digest("A"))
    before = [layer.down_MF.clone() for layer in ours.layers]
    assert runner.merge(life.digest("B"), lambda: True, (life.digest("A"),))
    assert runner._merged.decoder(life.digest("A")) is ours
    assert all(torch.equal(layer.down_MF, one) for layer, one in zip(ours.layers, before, strict=True))
    assert runner._merged.decoder(life.digest("B")).layers[0].qkv_NM.data_ptr() != ours.layers[0].qkv_NM.data_ptr()


def test_a_copy_whole_or_begun_keeps_no_memory_of_an_evicted_adapter(run: Callable[..., Life]) -> None:
    life = run(MergeMode.NEVER, "AB")
    runner = life.instance._runner
    for name, is_whole in (("A", True), ("B", False)):
        life.announce(name)
        life.tend()
        weights = weakref.ref(runner.adapters.get(life.digest(name)))
        assert runner.merge(life.digest(name), lambda whole=is_whole: whole) == is_whole
        life.retire(name)
        life.tend()
        gc.collect()
        assert weights() is None


def test_what_a_copy_given_up_took_is_not_part_of_the_next_ones_price(
    run: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = run(MergeMode.ALWAYS, "")  # requests would leave a copy begun, or whole, as fast as the machine is
    instance, prices = life.instance, list[Any]()
    for name in "ABC":
        life.announce(name)
    life.tend()
    copy_made = instance.core.copy_made

    def noting(digest: Any, seconds: float) -> None:
        prices.append((digest, seconds))
        copy_made(digest, seconds)

    monkeypatch.setattr(instance.core, "copy_made", noting)
    looks = itertools.count()

    def merge_a_layer_of(name: str) -> None:
        instance.core._merge.wanted = life.digest(name)
        instance._merge_more(lambda: float(next(looks)), 0.0)

    merge_a_layer_of("C")
    while not prices:
        merge_a_layer_of("A")
    merge_a_layer_of("C")
    while len(prices) < 2:
        merge_a_layer_of("B")
    per_copy = 2.0 * instance._runner.spec.num_layers  # the clock goes on by one at each look
    assert prices == [(life.digest("A"), per_copy), (life.digest("B"), per_copy)]


@pytest.mark.parametrize("name", "ABC")
@pytest.mark.parametrize("is_compiled", [True, False])
def test_merged_logits_are_those_of_the_unmerged_adapter_up_to_rounding(
    name: str, is_compiled: bool, run: Callable[..., Life]
) -> None:
    life = run(MergeMode.NEVER, name)
    runner = life.instance._runner
    life.announce(name)
    life.tend()
    assert runner.merge(life.digest(name), lambda: True)
    merged = runner._merged.decoder(life.digest(name))
    if not is_compiled:
        runner.decoder._fused = merged._fused = None
    ids = torch.tensor(SHARED[:12], dtype=torch.int32)
    places = torch.arange(12, dtype=torch.int32)
    meta = AttentionMeta(
        torch.tensor([0, 12], dtype=torch.int32), torch.tensor([12], dtype=torch.int32),
        torch.tensor([[0]], dtype=torch.int32), 12,
    )  # fmt: skip
    lora = runner.adapters.plan((AdapterRun(life.digest(name), 0, 12),))
    unmerged = runner.decoder.forward(ids, places, places, meta, runner.kv, lora)
    ours = merged.forward(ids, places, places, meta, runner.kv)
    torch.testing.assert_close(ours, unmerged, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(ours, runner.decoder.forward(ids, places, places, meta, runner.kv), atol=1e-2)


def test_without_room_in_the_budget_nothing_is_merged(run: Callable[..., Life]) -> None:
    life = run(MergeMode.NEVER, "A")
    needed = MergedDecoder.num_bytes(life.instance._runner.spec, life.instance._runner.dtype)
    assert merge_refusal(2 * needed, needed) is None
    assert [num_merged_copies(n * needed, needed) for n in (1, 2, 7, 100)] == [0, 1, 3, 8]
    assert "more than half" in str(merge_refusal(2 * needed - 1, needed))
    assert run(MergeMode.ALWAYS, "A").instance._runner.kv.num_blocks < life.instance._runner.kv.num_blocks

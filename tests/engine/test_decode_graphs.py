"""Replayed decoding gives the tokens of decoding op by op; here a recording runs its step again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nearline.engine.decode_graphs import CudaGraphs, DecodeGraphs, Record, Work
from nearline.engine.decode_shapes import RecordingPlan
from nearline.protocol import SamplingParams


def again(work: Work) -> tuple[Work, int]:
    """Record nothing: replaying runs the step again on the same tensors."""
    return work, 1000


def graphs_of(harness: Any, record: Record = again, after_steps: int = 2, max_bytes: int = 1 << 30) -> DecodeGraphs:
    runner, plan = harness.runner, RecordingPlan(max_bytes, after_steps)
    runner._graphs = DecodeGraphs(runner.decoder, runner.kv, record, plan)
    graphs: DecodeGraphs = runner._graphs
    return graphs


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "OPT"])
def test_replayed_steps_choose_the_same_tokens(
    family: str, tiny_model: Callable[..., Any], bind: Any, prompt: Any
) -> None:
    windows = {"sliding_window": 8, "num_hidden_layers": 7} if family == "Gemma3" else {}
    harness = bind(tiny_model(family, **windows))
    prompts = [prompt(length, seed=length) for length in (3, 17, 40)]
    sampling = [SamplingParams(temperature=0.0), SamplingParams(seed=4), SamplingParams(top_k=5, seed=9)]

    def run() -> list[list[int]]:
        sequences = [harness.sequence(t, s) for t, s in zip(prompts, sampling, strict=True)]
        return [list(tokens) for tokens in harness.generate(sequences, 12)]

    expected = run()
    graphs = graphs_of(harness)
    assert run() == expected
    assert graphs.num_recorded == 1
    assert run() == expected


def test_padding_writes_into_no_block(tiny_model: Callable[..., Any], bind: Any, prompt: Any) -> None:
    harness = bind(tiny_model("Llama"))
    graphs_of(harness, after_steps=0)
    sequences = [harness.sequence(prompt(5, seed=s)) for s in range(3)]
    harness.step(sequences)
    used = {block for sequence in sequences for block in sequence.block_table}
    others = [block for block in range(harness.runner.kv.num_blocks) if block not in used]
    harness.step(sequences)
    assert not harness.runner.kv.store[:, :, others].any()


def test_a_device_that_cannot_record_runs_op_by_op(
    tiny_model: Callable[..., Any], bind: Any, oracle_greedy: Any, prompt: Any
) -> None:
    tried: list[Work] = []

    def refuse(work: Work) -> tuple[Work, int]:
        tried.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    model, tokens = tiny_model("Llama"), prompt(9)
    harness = bind(model)
    graphs_of(harness, refuse, after_steps=1)
    assert harness.generate([harness.sequence(tokens)], 8)[0] == oracle_greedy(model, tokens, 8)
    assert len(tried) == 1


def test_no_more_is_recorded_than_its_budget_holds(
    tiny_model: Callable[..., Any], bind: Any, oracle_greedy: Any, prompt: Any
) -> None:
    model = tiny_model("Llama")
    harness = bind(model)
    graphs = graphs_of(harness, lambda work: (work, 1 << 20), after_steps=0, max_bytes=2 << 20)
    for count in range(1, 5):
        prompts = [prompt(9, seed=seed) for seed in range(count)]
        tokens = harness.generate([harness.sequence(one) for one in prompts], 4)
        assert tokens == [oracle_greedy(model, one, 4) for one in prompts]
        assert graphs.num_recorded == min(count, 2), "sizes of 1, 2 and 4 sequences"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_choose_the_same_tokens(tiny_model: Callable[..., Any], bind: Any, prompt: Any) -> None:
    plain, recorded = (bind(tiny_model("Llama"), device="cuda", is_recorded=flag) for flag in (False, True))
    assert isinstance(recorded.runner._graphs._record, CudaGraphs)
    prompts = [prompt(length) for length in (3, 30)]
    outputs = [h.generate([h.sequence(tokens) for tokens in prompts], 20) for h in (plain, recorded)]
    assert outputs[0] == outputs[1]
    assert recorded.runner._graphs.num_recorded

"""A Runner on a tiny model: whatever goes wrong in a step is the outcome of the sequence it went wrong in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nearline.engine.models.layers import compute_dtype
from nearline.engine.runner import Runner, RunnerConfig
from nearline.engine.types import Batch
from nearline.protocol import SamplingParams
from nearline.protocol.errors import CheckpointCorrupt, InstanceFailed, OutOfMemory

SAMPLED = {"temperature": 0.9, "top_p": 0.95}


@pytest.fixture
def harness(tiny_model: Callable[..., Any], bind: Callable[..., Any]) -> Any:
    return bind(tiny_model("Llama"))


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_a_resume(harness: Any, prompt: Any) -> None:
    tokens = prompt(20)
    sampling = [SamplingParams(seed=seed, **SAMPLED) for seed in range(8)]
    alone = [harness.generate([harness.sequence(tokens, s)], 16)[0] for s in sampling]
    assert len({tuple(t) for t in alone}) > 4, "seeds make no difference"
    assert harness.generate([harness.sequence(tokens, s) for s in sampling], 16) == alone
    for seed, whole in enumerate(alone):
        resumed = harness.sequence([*tokens, *whole[:7]], sampling[seed], num_prompt=20)
        assert harness.generate([resumed], 9)[0] == whole[7:]


def test_penalties_see_prompt_and_output_after_a_resume(harness: Any, prompt: Any) -> None:
    tokens = prompt(12)
    sampling = SamplingParams(
        seed=3, presence_penalty=1.0, frequency_penalty=0.7, repetition_penalty=1.2, min_tokens=9, **SAMPLED
    )
    whole = harness.generate([harness.sequence(tokens, sampling)], 14)[0]
    resumed = harness.sequence([*tokens, *whole[:5]], sampling, num_prompt=12)
    assert harness.generate([resumed], 9)[0] == whole[5:]


def test_min_tokens_holds_eos_and_stop_tokens_back(harness: Any, prompt: Any) -> None:
    tokens = prompt(10)
    likely = tuple(harness.logits(tokens)[-1].topk(3).indices.tolist())
    # EOS (2) made the most likely token of all, the next best ones stop tokens.
    bias = ((2, 100.0), *((token, 50.0) for token in likely))
    params = {"temperature": 0.0, "logit_bias": bias, "stop_token_ids": likely}
    free = harness.generate([harness.sequence(tokens, SamplingParams(**params))], 4)[0]
    held = harness.generate([harness.sequence(tokens, SamplingParams(min_tokens=3, **params))], 4)[0]
    ignoring = SamplingParams(min_tokens=3, ignore_eos=True, **params)
    assert free == [2, 2, 2, 2]
    assert not {2, *likely} & set(held[:3])
    assert held[3] == 2
    assert harness.generate([harness.sequence(tokens, ignoring)], 4)[0] == [2, 2, 2, 2]


def test_logprobs_come_with_greedy_and_sampled_tokens(harness: Any, prompt: Any) -> None:
    tokens = prompt(10)
    exact = harness.logits(tokens)[-1].double().log_softmax(-1)
    greedy = harness.sequence(tokens, SamplingParams(temperature=0.0, logprobs=3))
    drawn = harness.sequence(tokens, SamplingParams(seed=1, logprobs=0))
    plain = harness.sequence(tokens, SamplingParams(temperature=0.0))
    first, second, third = harness.step([greedy, drawn, plain])
    top = exact.topk(3)
    assert [token for token, _ in first.logprob.top] == top.indices.tolist()
    assert [value for _, value in first.logprob.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert second.logprob.logprob == pytest.approx(float(exact[second.token_id]), abs=1e-5)
    assert second.logprob.top == ()
    assert third.logprob is None
    assert third.token_id == first.token_id


def test_a_token_outside_the_vocabulary_fails_its_sequence_alone(harness: Any, prompt: Any) -> None:
    expected = harness.generate([harness.sequence(prompt(9, seed=1))], 1)[0]
    bad = harness.sequence([3, 100_000, 4])
    good = harness.sequence(prompt(9, seed=1))
    first, second = harness.step([bad, good])
    assert first.error.code == "invalid_request"
    assert "vocabulary of 199" in first.error.message
    assert [second.token_id] == expected


def test_a_chunk_that_fails_without_being_sampled_is_named(harness: Any, prompt: Any) -> None:
    bad = harness.sequence([3, 100_000, 4, 5])
    good = harness.sequence(prompt(9, seed=1))
    items = [harness.item(bad, 2, False), harness.item(good, 9, True)]
    (outcome,) = harness.runner.run(Batch(items))
    assert outcome.error is None
    ((request_id, error),) = harness.runner.failed
    assert request_id == bad.request.request_id
    assert error.code == "invalid_request"
    harness.runner.run(Batch([harness.item(harness.sequence([3]), 1, True)]))
    assert harness.runner.failed == []


def test_not_a_number_fails_its_sequence_alone(
    tiny_model: Callable[..., Any], bind: Callable[..., Any], prompt: Any
) -> None:
    model = tiny_model("Llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = float("nan")
    harness = bind(model)
    clean = [t for t in prompt(12) if t != 77]
    expected = harness.generate([harness.sequence(clean)], 1)[0]
    bad = harness.sequence([5, 77, 6])
    outcomes = harness.step([bad, harness.sequence(clean)])
    assert outcomes[0].error.code == "not_a_number"
    assert "position 3" in outcomes[0].error.message
    assert [outcomes[1].token_id] == expected
    # Blocks that held what is not a number are harmless to whoever gets them next.
    harness.release(bad)
    assert harness.generate([harness.sequence(clean)], 1)[0] == expected


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
)
def test_a_lost_device_is_the_fault_of_the_process_and_of_no_item(
    harness: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    calls = []

    def forward(*_: Any, **__: Any) -> Any:
        calls.append(1)
        raise error

    monkeypatch.setattr(harness.runner.decoder, "forward", forward)
    with pytest.raises(InstanceFailed, match="the device cpu failed"):
        harness.step([harness.sequence(prompt(5)), harness.sequence(prompt(6))])
    assert len(calls) == 1, "nothing is tried again on it"


def test_running_out_of_device_memory_is_not_the_end(
    harness: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    monkeypatch.setattr(harness.runner.decoder, "forward", forward)
    (outcome,) = harness.step([harness.sequence(prompt(5))])
    assert outcome.error.code == "out_of_memory"


def test_a_bad_bias_fails_its_sequence_alone(harness: Any, prompt: Any) -> None:
    bad = harness.sequence(prompt(5), SamplingParams(temperature=0.0, logit_bias=((999, 1.0),)))
    first, second = harness.step([bad, harness.sequence(prompt(5))])
    assert first.error.code == "invalid_request"
    assert second.error is None


def test_copied_blocks_carry_keys_and_values(harness: Any, prompt: Any) -> None:
    tokens = prompt(20)
    expected = harness.generate([harness.sequence(tokens)], 4)[0]
    original = harness.sequence(tokens)
    harness.runner.run(Batch([harness.item(original, 19, False)]))
    twin = harness.sequence(tokens)
    twin.block_table = [harness._free.pop() for _ in original.block_table]
    twin.num_computed = 19
    copies = tuple(zip(original.block_table, twin.block_table, strict=True))
    item = harness.item(twin, 1, True)
    (outcome,) = harness.runner.run(Batch([item], block_copies=copies))
    twin.token_ids.append(outcome.token_id)
    assert [outcome.token_id, *harness.generate([twin], 3)[0]] == expected


def test_a_missing_or_misshapen_tensor_is_refused_at_once(tiny_model: Callable[..., Any], bind: Any) -> None:
    harness = bind(tiny_model("Llama", num_hidden_layers=1))
    spec, config = harness.runner.spec, RunnerConfig(kv_bytes=1 << 20)
    weights = harness.weights
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = weights.tensors.pop(name)
    with pytest.raises(CheckpointCorrupt, match=r"up_proj.*missing"):
        Runner(weights, spec, config)
    weights.tensors[name] = tensor[1:]
    with pytest.raises(CheckpointCorrupt, match=r"up_proj.*\[111, 64\].*\[112, 64\]"):
        Runner(weights, spec, config)


def test_a_budget_without_room_for_one_block_is_refused(harness: Any) -> None:
    with pytest.raises(OutOfMemory, match="raise kv_bytes"):
        Runner(harness.weights, harness.runner.spec, RunnerConfig(kv_bytes=1000))


def test_the_first_forward_pass_waits_layer_by_layer_and_later_ones_for_nothing(
    tiny_model: Callable[..., Any], bind: Any, prompt: Any
) -> None:
    harness = bind(tiny_model("Llama", tie_word_embeddings=True))
    waited: list[str] = []
    harness.weights.wait_for = lambda names: waited.extend(names)
    harness.generate([harness.sequence(prompt(5))], 1)
    layers = [name.split(".")[2] for name in waited if ".layers." in name]
    assert layers == sorted(layers), "layers are awaited in the order they run"
    assert waited[0] == waited[-1] == "model.embed_tokens.weight", "first as embedding, at last as the tied head"
    assert set(layers) == {"0", "1", "2"}
    waited.clear()
    harness.generate([harness.sequence(prompt(5))], 2)
    assert waited == []


def test_bytes_that_cannot_come_are_nobodys_fault(tiny_model: Callable[..., Any], bind: Any, prompt: Any) -> None:
    harness = bind(tiny_model("Llama"))

    def fail(names: list[str]) -> None:
        raise CheckpointCorrupt("chunk 3 does not match its digest")

    harness.weights.wait_for = fail
    with pytest.raises(CheckpointCorrupt, match="chunk 3"):
        harness.step([harness.sequence(prompt(5))])


def test_weights_of_the_compute_dtype_are_not_copied(tiny_model: Callable[..., Any], bind: Any, prompt: Any) -> None:
    harness = bind(tiny_model("Llama", dtype=torch.bfloat16))
    harness.generate([harness.sequence(prompt(3))], 1)
    stored = harness.weights.tensors["model.layers.1.mlp.down_proj.weight"]
    assert harness.runner.decoder.layers[1].down_MF.data_ptr() == stored.data_ptr()
    assert compute_dtype(harness.runner.spec, harness.weights) == torch.bfloat16


def test_the_warm_up_runs_every_path_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and a decode of two sequences, one greedy, one sampled with an adapter; and no step fails."""
    from nearline.engine.warmup import warm_up

    ran: list[tuple[torch.dtype, bool, set[tuple[bool, bool]]]] = []
    run = Runner.run

    def noted(self: Runner, batch: Batch) -> list[Any]:
        outcomes = run(self, batch)
        requests = [item.sequence.request for item in batch.items]
        kinds = {(each.sampling.temperature > 0, each.adapter_digest is not None) for each in requests}
        ran.append((self.dtype, batch.items[0].num_tokens > 1, kinds))
        assert [outcome.error for outcome in outcomes] == [None] * len(requests)
        assert all(outcome.token_id is not None for outcome in outcomes)
        return outcomes

    monkeypatch.setattr(Runner, "run", noted)
    warm_up("cpu", 1)
    both = {(False, False), (True, True)}
    dtypes, parts = (torch.bfloat16, torch.float32), (True, False)
    assert ran == [(dtype, is_prompt, both) for dtype in dtypes for is_prompt in parts]

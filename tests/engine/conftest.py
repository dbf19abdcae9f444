"""Tiny random models of transformers bound to a Runner, and the simplest engine loop that can drive one."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nearline.engine.batch_tensors import adapter_order
from nearline.engine.runner import Runner, RunnerConfig
from nearline.engine.sequence import Sequence
from nearline.engine.types import Batch, BatchItem, SampledToken
from nearline.protocol import Digest, ModelId, Request, RequestId, SamplingParams, decoder_spec
from nearline.protocol.errors import CheckpointCorrupt
from tests.engine.checkpoints import Oracle, import_checkpoint, make_sources

TINY: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SMALLER = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
"""For contexts whose every pair of positions the oracle computes."""
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class StateDictWeights:
    """A transformers model's own tensors, as the decoder asks for them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise CheckpointCorrupt(f"tensor {name!r} is missing; import the model again")
        return self.tensors[name]

    def fused(self, names: Seq[str]) -> Tensor:
        return torch.cat([self.tensors[name] for name in names])

    def wait_for(self, names: Seq[str]) -> None: ...

    def is_complete(self) -> bool:
        return True


class Harness:
    """A Runner with shuffled blocks: sequences come, run in any chunks and batches, and give their blocks back."""

    def __init__(self, weights: StateDictWeights, runner: Runner) -> None:
        self.weights, self.runner = weights, runner
        self._free = list(range(runner.kv.num_blocks))
        random.Random(0).shuffle(self._free)
        self._count = 0

    def sequence(
        self, tokens: Seq[int], sampling: SamplingParams = GREEDY, adapter: str | None = None, num_prompt: int = 0
    ) -> Sequence:
        self._count += 1
        prompt = tuple(tokens[: num_prompt or len(tokens)])
        digest = None if adapter is None else Digest(adapter)
        request = Request(RequestId(f"r{self._count}"), ModelId("m"), prompt, sampling, adapter_digest=digest)
        return Sequence(request, 1, list(tokens), arrived_at=0.0)

    def item(self, sequence: Sequence, num_tokens: int, is_sampled: bool) -> BatchItem:
        """Take the next tokens of a sequence, giving it the blocks they need."""
        start = sequence.num_computed
        while len(sequence.block_table) * self.runner.kv.block_size < start + num_tokens:
            sequence.block_table.append(self._free.pop())
        sequence.num_computed += num_tokens
        return BatchItem(sequence, start, num_tokens, is_sampled)

    def release(self, sequence: Sequence) -> None:
        self._free += sequence.block_table
        sequence.block_table = []
        sequence.num_computed = 0

    def step(self, sequences: Seq[Sequence], chunk: int = 1 << 30) -> list[SampledToken]:
        """Run one step over what each sequence has not computed yet; tokens are appended, outcomes returned."""
        items = []
        for sequence in sequences:
            num_tokens = min(chunk, sequence.num_uncomputed)
            items.append(self.item(sequence, num_tokens, num_tokens == sequence.num_uncomputed))
        outcomes = self.runner.run(Batch(items))
        sampled = [item.sequence for item in items if item.is_sampled]
        for sequence, outcome in zip(sampled, outcomes, strict=True):
            if outcome.error is None:
                sequence.token_ids.append(outcome.token_id)
        return outcomes

    def generate(self, sequences: Seq[Sequence], num_tokens: int, chunk: int = 1 << 30) -> list[list[int]]:
        """Run sequences together until each has `num_tokens` more; returns what was generated."""
        begins = [len(s.token_ids) for s in sequences]
        while unfinished := [s for s, b in zip(sequences, begins, strict=True) if len(s.token_ids) < b + num_tokens]:
            for outcome in self.step(unfinished, chunk):
                assert outcome.error is None, outcome.error
        for sequence in sequences:
            self.release(sequence)
        return [s.token_ids[b:] for s, b in zip(sequences, begins, strict=True)]

    def logits(self, tokens: Seq[int], chunk: int = 1 << 30, adapter: str | None = None) -> Tensor:
        """Logits after every position of one sequence, computed in chunks. Shapes: [T, V]."""
        sequence = self.sequence(tokens, adapter=adapter)
        parts = []
        while sequence.num_uncomputed:
            hidden, _ = self.runner.hidden([self.item(sequence, min(chunk, sequence.num_uncomputed), True)])
            parts.append(self.runner.decoder.logits(hidden))
        self.release(sequence)
        return torch.cat(parts)

    def logits_together(self, sequences: Seq[Sequence]) -> list[Tensor]:
        """Logits after every uncomputed position of several sequences run in one step."""
        items = [self.item(sequence, sequence.num_uncomputed, True) for sequence in sequences]
        order = adapter_order(items)
        hidden, _step = self.runner.hidden([items[i] for i in order])
        parts = self.runner.decoder.logits(hidden).split([items[i].num_tokens for i in order])
        return [parts[order.index(i)] for i in range(len(items))]


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """Make a tiny random model of a transformers architecture ("Llama", "Qwen3" …); keywords override its config."""

    def make(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
        import transformers

        cls = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")
        config = cls.config_class(**(TINY | overrides))
        config._attn_implementation = "eager"
        torch.manual_seed(seed)
        model = cls(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norms of 1 and biases of 0 would hide a weight that is not read; large ones make logits differ.
                spread = 0.2 if parameter.dim() == 1 else 0.1
                parameter.copy_(torch.randn_like(parameter) * spread + ("norm" in name or ".ln_" in name))
                # Parameters only, as from_pretrained does: rotary buffers stay in float32.
                parameter.data = parameter.data.to(dtype)
        return model

    return make


@pytest.fixture(scope="session")
def bind() -> Callable[..., Harness]:
    """Bind a transformers model to a Runner."""

    def make(model: Any, num_tokens: int = 4096, **config: Any) -> Harness:
        plain = model.config.to_dict() | {"architectures": [type(model).__name__]}
        plain["dtype"] = str(model.dtype).removeprefix("torch.")
        spec = decoder_spec(plain)
        kv_bytes = num_tokens * spec.kv_values_per_token * (config.get("dtype") or model.dtype).itemsize
        runner_config = RunnerConfig(kv_bytes=kv_bytes, **({"eos_token_ids": (2,)} | config))
        weights = StateDictWeights(model.state_dict())
        return Harness(weights, Runner(weights, spec, runner_config))

    return make


@pytest.fixture(scope="session")
def make_harness() -> type[Harness]:
    """Make a harness of a Runner and its weights."""
    return Harness


@pytest.fixture(scope="session")
def oracle_logits() -> Callable[..., Tensor]:
    """What transformers answers for the same tokens. Shapes: [T, V] fp32."""

    def run(model: Any, tokens: Seq[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([list(tokens)])).logits[0].float()
        return logits

    return run


@pytest.fixture(scope="session")
def oracle_greedy() -> Callable[..., list[int]]:
    """What transformers generates greedily, by the plainest loop: no cache, no generate()."""

    def run(model: Any, tokens: Seq[int], num_tokens: int) -> list[int]:
        sequence = list(tokens)
        with torch.inference_mode():
            for _ in range(num_tokens):
                sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
        return sequence[len(tokens) :]

    return run


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    """Make a random prompt of a given length."""

    def make(length: int, seed: int = 0) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(3, TINY["vocab_size"]) for _ in range(length)]

    return make


@pytest.fixture(scope="session")
def sources(tiny_llama_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models a and b, and the adapters lora4 and lora8 of a, as other tools write them."""
    return make_sources(tiny_llama_dir, tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def checkpoints(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same, imported: their committed directories."""
    root = tmp_path_factory.mktemp("store")
    made = {name: import_checkpoint(root, "model", sources[name]) for name in ("a", "b")}
    for name in ("lora4", "lora8"):
        made[name] = import_checkpoint(root, "adapter", sources[name], base=made["a"].name)
    return made


@pytest.fixture(scope="session")
def oracles(sources: dict[str, Path]) -> dict[str, Oracle]:
    """What transformers and peft generate from them."""
    made = {name: Oracle(sources[name]) for name in ("a", "b")}
    return made | {name: Oracle(sources["a"], sources[name]) for name in ("lora4", "lora8")}

"""The real SmolLM2-135M, imported from its GGUF file: greedy tokens in float32 equal those of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.engine.runner import Runner, RunnerConfig
from nearline.loader import load_directory
from nearline.protocol import CheckpointKind, decoder_spec

PROMPTS = [
    "The capital of France is",
    "<|im_start|>user\nWrite a haiku about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5, 6, 7,",
    "Once upon a time, in a village at the edge of a great forest, there lived an old clockmaker who",
    "Q: What is the boiling point of water at sea level?\nA:",
    "Liebe Freunde, heute möchte ich euch erzählen, warum",
    "SELECT name, age FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "Water is made of hydrogen and",
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nName three colours.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "import numpy as np\n\nx = np.",
    "In 1969, the first man on the moon",
    "To be, or not to be,",
    "Ingredients: flour, sugar, butter, eggs. Method: first,",
    "The derivative of x^2 is",
    "a",
    '{"name": "Ada", "born":',
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics state that energy",
]


class RealModel:
    def __init__(self, directory: Path, harness: Any) -> None:
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM

        self.harness = harness
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def expected(self, text: str, num_tokens: int) -> list[int]:
        tokens = torch.tensor([self.tokens(text)])
        settings = {"do_sample": False, "max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        # eos_token_id=None: generation goes on past it, as the harness does.
        out = self.oracle.generate(tokens, eos_token_id=None, pad_token_id=0, **settings)
        generated: list[int] = out[0, tokens.shape[1] :].tolist()
        return generated

    def generate(self, texts: list[str], num_tokens: int, chunk: int = 1 << 30) -> list[list[int]]:
        sequences = [self.harness.sequence(self.tokens(text)) for text in texts]
        generated: list[list[int]] = self.harness.generate(sequences, num_tokens, chunk)
        return generated


@pytest.fixture(scope="module")
def smollm2(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory, make_harness: Callable[..., Any]
) -> RealModel:
    root = tmp_path_factory.mktemp("smollm2")
    digest = import_checkpoint(root, CheckpointKind.MODEL, str(smollm2_gguf)).digest
    directory = root / "checkpoints" / digest
    weights = load_directory(directory, "cpu")
    model = RealModel(directory, None)
    spec = decoder_spec(model.oracle.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    config = RunnerConfig(kv_bytes=4096 * 4 * spec.kv_values_per_token, dtype=torch.float32)
    model.harness = make_harness(weights, Runner(weights, spec, config))
    return model


def test_greedy_tokens_equal_transformers(smollm2: RealModel) -> None:
    texts = PROMPTS[:4]
    expected = [smollm2.expected(text, 12) for text in texts]
    assert [smollm2.generate([text], 12)[0] for text in texts[:2]] == expected[:2]
    assert smollm2.generate(texts, 12, chunk=5) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_greedy_tokens_of_twenty_prompts_equal_transformers_alone_and_in_batches_of_eight(smollm2: RealModel) -> None:
    expected = [smollm2.expected(text, 24) for text in PROMPTS]
    for text, tokens in zip(PROMPTS, expected, strict=True):
        assert smollm2.generate([text], 24)[0] == tokens, text
    for chunk in (1 << 30, 13):
        for begin in (0, 8, 12):
            assert smollm2.generate(PROMPTS[begin : begin + 8], 24, chunk) == expected[begin : begin + 8]


def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(
    smollm2: RealModel, make_harness: Callable[..., Any]
) -> None:
    """Bound: root mean square error against float32 at most 1.1 times transformers' in bfloat16."""
    tokens = smollm2.tokens(PROMPTS[8])
    with torch.inference_mode():
        exact = smollm2.oracle(torch.tensor([tokens])).logits[0]
    spec, weights = smollm2.harness.runner.spec, smollm2.harness.weights
    ours = make_harness(weights, Runner(weights, spec, RunnerConfig(kv_bytes=1 << 24)))
    assert ours.runner.dtype == torch.bfloat16
    theirs = smollm2.oracle.__class__.from_pretrained(smollm2.oracle.name_or_path, dtype=torch.bfloat16)
    with torch.inference_mode():
        theirs_error = (theirs(torch.tensor([tokens])).logits[0].float() - exact).square().mean().sqrt()
    ours_error = (ours.logits(tokens) - exact).square().mean().sqrt()
    assert ours_error <= 1.1 * theirs_error, f"{ours_error} against {theirs_error}"

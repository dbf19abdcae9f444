"""Adapters that change the token embedding or the head, by LoRA or whole, tied or not, against peft."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.loader import load_directory
from nearline.protocol import CheckpointKind, Digest, SamplingParams

FORMS: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["lm_head"]},
    "head and projections": {"target_modules": ["lm_head", "q_proj", "down_proj"], "use_rslora": True},
    "embedding": {"target_modules": ["embed_tokens"]},
    "embedding, head and a pattern": {
        "target_modules": ["embed_tokens", "lm_head", "v_proj"], "rank_pattern": {"lm_head": 7},
        "alpha_pattern": {"embed_tokens": 3},
    },
    "whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "whole embedding": {"target_modules": ["up_proj"], "modules_to_save": ["embed_tokens"]},
    "both whole": {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}  # fmt: skip


class Bound:
    """A base bound to a harness, and peft adapters of it made, imported and loaded on demand."""

    def __init__(self, model: Any, harness: Any, root: Path, tokenizer: str) -> None:
        self.model, self.harness, self.root = model, harness, root
        model.save_pretrained(root / "base")
        (root / "base" / "tokenizer.json").write_text(tokenizer)
        self.base = import_checkpoint(root, CheckpointKind.MODEL, str(root / "base")).digest
        self.made: dict[str, tuple[str, Any]] = {}

    def adapter(self, form: str) -> tuple[str, Any]:
        from peft import LoraConfig, get_peft_model

        if form not in self.made:
            torch.manual_seed(len(self.made))
            config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **FORMS[form])
            peft: Any = get_peft_model(copy.deepcopy(self.model), config)
            for parameter in peft.parameters():
                if parameter.requires_grad:
                    parameter.data += torch.randn_like(parameter) * 0.15
            source = self.root / form.replace(" ", "-")
            peft.save_pretrained(source)
            digest = import_checkpoint(self.root, CheckpointKind.ADAPTER, str(source), self.base).digest
            self.harness.runner.adapters.load(Digest(digest), load_directory(self.root / "checkpoints" / digest, "cpu"))
            self.made[form] = digest, peft.eval()
        return self.made[form]

    def logits(self, forms: list[str | None], prompts: list[list[int]]) -> list[torch.Tensor]:
        """Logits after every position of sequences run in one step, each with its own adapter's tables."""
        digests = [None if form is None else self.adapter(form)[0] for form in forms]
        sequences = [self.harness.sequence(p, adapter=d) for p, d in zip(prompts, digests, strict=True)]
        runner, parts = self.harness.runner, []
        order = sorted(range(len(forms)), key=lambda i: digests[i] or "")
        items = [self.harness.item(sequences[i], len(prompts[i]), True) for i in order]
        hidden, _step = runner.hidden(items)
        parts = runner.logits(hidden, [i.sequence for i in items for _ in range(i.num_tokens)])
        split = parts.split([len(prompts[i]) for i in order])
        for sequence in sequences:
            self.harness.release(sequence)
        return [split[order.index(i)] for i in range(len(forms))]


@pytest.fixture(scope="module", params=["tied", "untied"])
def bound(
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., Any],
    bind: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
    tiny_tokenizer_json: dict[str, Any],
) -> Bound:
    model = tiny_model("Llama", vocab_size=259, tie_word_embeddings=request.param == "tied")
    return Bound(model, bind(model), tmp_path_factory.mktemp(request.param), json.dumps(tiny_tokenizer_json))


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_of_the_tables_equals_peft(form: str, bound: Bound, prompt: Any) -> None:
    tokens = prompt(24)
    _digest, peft = bound.adapter(form)
    with torch.inference_mode():
        expected = peft(torch.tensor([tokens])).logits[0]
        base = bound.model(torch.tensor([tokens])).logits[0]
    ours = bound.logits([form], [tokens])[0]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    assert (expected - base).abs().max() > 0.1, "the adapter changes nothing: a vacuous test"


def test_a_mixed_batch_equals_each_alone_bit_for_bit(bound: Bound, prompt: Any) -> None:
    forms: list[str | None] = [None, *FORMS, None, "head"]
    prompts = [prompt(4 + 2 * i, seed=i) for i in range(len(forms))]
    together = bound.logits(forms, prompts)
    for form, tokens, logits in zip(forms, prompts, together, strict=True):
        assert torch.equal(logits, bound.logits([form], [tokens])[0]), form


def test_tokens_and_the_prompts_log_probabilities_are_the_adapters(bound: Bound, prompt: Any) -> None:
    tokens = prompt(18)
    digest, peft = bound.adapter("embedding, head and a pattern")
    with torch.inference_mode():
        sequence = list(tokens)
        for _ in range(8):
            sequence.append(int(peft(torch.tensor([sequence])).logits[0, -1].argmax()))
        logprobs = peft(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]
    assert bound.harness.generate([bound.harness.sequence(tokens, adapter=digest)], 8)[0] == sequence[18:]
    scored = bound.harness.sequence(tokens, SamplingParams(temperature=0.0, prompt_logprobs=0), adapter=digest)
    outcome = bound.harness.step([scored])[0]
    found = [one.logprob for one in outcome.prompt_logprobs]
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_copy_of_the_bases_own_tables_is_not_kept(bound: Bound) -> None:
    digest, _peft = bound.adapter("head")
    names = [entry.name for entry in load_directory(bound.root / "checkpoints" / digest, "cpu").manifest.tensors]
    assert names == ["matrices", "sites"]

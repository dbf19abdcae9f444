"""Adapters against peft, imported and loaded the way a node does it."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.loader import load_directory
from nearline.protocol import CheckpointKind, Digest
from nearline.protocol.errors import AdapterMismatch

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "rsLoRA": {"r": 16, "lora_alpha": 8, "target_modules": ALL, "use_rslora": True},
    "rank and alpha patterns": {
        "r": 4, "lora_alpha": 8, "target_modules": ALL, "rank_pattern": {"down_proj": 12, r"layers\.1\..*q_proj": 2},
        "alpha_pattern": {"gate_proj": 24},
    },
    "attention only": {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "v_proj"]},
    "some layers": {"r": 8, "lora_alpha": 4, "target_modules": ["up_proj", "o_proj"], "layers_to_transform": [0, 2]},
    "all-linear": {"r": 5, "lora_alpha": 10, "target_modules": "all-linear"},
    "regex": {"r": 4, "lora_alpha": 8, "target_modules": r".*layers\.[01]\..*\.(q|down)_proj"},
    "excluded": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "exclude_modules": r".*layers\.1\..*|.*\.k_proj"},
    "fan in fan out": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "fan_in_fan_out": True},
    "DoRA": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "use_dora": True},
    "DoRA with rsLoRA": {"r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "down_proj"], "use_dora": True,
                         "use_rslora": True},
}  # fmt: skip


class Fleet:
    """One base, its peft twin with every adapter of FORMS, and a harness that has loaded them all."""

    def __init__(self, model: Any, harness: Any, root: Path, tokenizer: str) -> None:
        from peft import LoraConfig, get_peft_model

        base_dir = root / "base"
        model.save_pretrained(base_dir)
        (base_dir / "tokenizer.json").write_text(tokenizer)
        base = import_checkpoint(root, CheckpointKind.MODEL, str(base_dir)).digest
        self.harness = harness
        self.digests: dict[str, str] = {}
        self.peft: Any = None
        for seed, (name, form) in enumerate(FORMS.items()):
            plain_name = name.replace(" ", "-")
            if self.peft is None:
                self.peft = get_peft_model(model, LoraConfig(**form), adapter_name=plain_name)
            else:
                self.peft.add_adapter(plain_name, LoraConfig(**form))
            torch.manual_seed(seed)
            for parameter_name, parameter in self.peft.named_parameters():
                if f".{plain_name}." in parameter_name:
                    parameter.data.normal_(0, 0.15)
            self.peft.save_pretrained(root / "peft", selected_adapters=[plain_name])
            source = str(root / "peft" / plain_name)
            self.digests[name] = import_checkpoint(root, CheckpointKind.ADAPTER, source, base).digest
            self.load(name, root)
        self.root = root

    def load(self, name: str, root: Path) -> int:
        directory = root / "checkpoints" / self.digests[name]
        adapters = self.harness.runner.adapters
        used: int = adapters.load(Digest(self.digests[name]), load_directory(directory, "cpu")).num_bytes
        return used

    def oracle(self, name: str | None, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            if name is None:
                with self.peft.disable_adapter():
                    return self.peft(torch.tensor([tokens])).logits[0].float()
            self.peft.set_adapter(name.replace(" ", "-"))
            return self.peft(torch.tensor([tokens])).logits[0].float()

    def sequence(self, name: str | None, tokens: list[int]) -> Any:
        return self.harness.sequence(tokens, adapter=None if name is None else self.digests[name])


@pytest.fixture(scope="module")
def fleet(
    tiny_model: Callable[..., Any],
    bind: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
    tiny_tokenizer_json: dict[str, Any],
) -> Fleet:
    model = tiny_model("Llama", vocab_size=259)
    return Fleet(model, bind(model), tmp_path_factory.mktemp("fleet"), json.dumps(tiny_tokenizer_json))


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_equals_peft(form: str, fleet: Fleet, prompt: Any) -> None:
    tokens = prompt(40)
    ours = fleet.harness.logits(tokens, chunk=16, adapter=fleet.digests[form])
    torch.testing.assert_close(ours, fleet.oracle(form, tokens), atol=1e-4, rtol=0)
    assert (ours - fleet.oracle(None, tokens)).abs().max() > 0.1, "the adapter changes nothing: a vacuous test"


@pytest.mark.parametrize(
    "settings",
    [
        {"bias": "lora_only", "target_modules": ["q_proj", "down_proj"]},
        {"bias": "all", "target_modules": ["q_proj", "down_proj"]},
        {"bias": "all", "target_modules": ALL, "use_dora": True},
        {"bias": "none", "target_modules": ALL, "use_dora": True},
    ],
)
def test_trained_biases_and_magnitudes_over_biases_are_pefts(
    settings: dict[str, Any], tiny_model: Callable[..., Any], bind: Callable[..., Any], prompt: Any, tmp_path: Path,
    tiny_tokenizer_json: dict[str, Any],
) -> None:  # fmt: skip
    from peft import LoraConfig, get_peft_model

    model = tiny_model("Llama", vocab_size=259, attention_bias=True, mlp_bias=True)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json))
    base = import_checkpoint(tmp_path, CheckpointKind.MODEL, str(tmp_path / "base")).digest
    harness, tokens = bind(model), prompt(20)
    unadapted = harness.logits(tokens)
    peft: Any = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, lora_alpha=8, **settings))
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0.1, 0.15)
    peft.save_pretrained(tmp_path / "adapter")
    digest = import_checkpoint(tmp_path, CheckpointKind.ADAPTER, str(tmp_path / "adapter"), base).digest
    directory = tmp_path / "checkpoints" / digest
    harness.runner.adapters.load(digest, load_directory(directory, "cpu"))
    with torch.inference_mode():
        expected = peft(torch.tensor([tokens])).logits[0]
    mixed = harness.logits_together([harness.sequence(tokens, adapter=digest), harness.sequence(tokens)])
    torch.testing.assert_close(mixed[0], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(mixed[1], unadapted, atol=1e-5, rtol=0)
    assert (expected - unadapted).abs().max() > 0.1


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_mixed_batch_equals_each_alone_and_peft(
    is_compiled: bool, fleet: Fleet, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(fleet.harness.runner.decoder, "_fused", None)
    _check_mixed_batch(fleet, prompt)


def _check_mixed_batch(fleet: Fleet, prompt: Any) -> None:
    names = [*FORMS, None, "plain", None, "rsLoRA"]
    prompts = [prompt(5 + 3 * i, seed=i) for i in range(len(names))]
    together = fleet.harness.logits_together(
        [fleet.sequence(name, tokens) for name, tokens in zip(names, prompts, strict=True)]
    )
    for name, tokens, logits in zip(names, prompts, together, strict=True):
        digest = None if name is None else fleet.digests[name]
        torch.testing.assert_close(logits, fleet.harness.logits(tokens, adapter=digest), atol=1e-5, rtol=0)
        torch.testing.assert_close(logits, fleet.oracle(name, tokens), atol=1e-4, rtol=0)


def test_greedy_tokens_in_a_mixed_batch_equal_each_alone(fleet: Fleet, prompt: Any) -> None:
    names = ["plain", None, "rsLoRA", "attention only", None, "some layers"]
    prompts = [prompt(30 - i, seed=i) for i in range(len(names))]
    pairs = list(zip(names, prompts, strict=True))
    alone = [fleet.harness.generate([fleet.sequence(n, p)], 10)[0] for n, p in pairs]
    assert fleet.harness.generate([fleet.sequence(n, p) for n, p in pairs], 10) == alone
    assert fleet.harness.generate([fleet.sequence(n, p) for n, p in reversed(pairs)], 10, chunk=9) == alone[::-1]


def test_rows_without_adapter_are_bit_equal_to_the_base_alone(fleet: Fleet, prompt: Any) -> None:
    prompts = [prompt(12, seed=i) for i in range(4)]
    mixed = fleet.harness.logits_together(
        [fleet.sequence(name, p) for name, p in zip([None, "plain", None, "rsLoRA"], prompts, strict=True)]
    )
    # The same rows in the same places: what the adapters added must not have touched these.
    order = [0, 2, 1, 3]
    base = fleet.harness.logits_together([fleet.sequence(None, prompts[i]) for i in order])
    assert torch.equal(mixed[0], base[0])
    assert torch.equal(mixed[2], base[1])


def test_memory_is_that_of_the_own_rank_and_unloading_gives_it_back(fleet: Fleet) -> None:
    adapters, before = fleet.harness.runner.adapters, fleet.harness.runner.adapters.num_bytes
    digest = Digest(fleet.digests["attention only"])
    adapters.unload(digest)
    # q [64 → 64] and v [64 → 32] in 3 layers at rank 3, in float32.
    own_bytes = 3 * 3 * (64 + 64 + 64 + 32) * 4
    assert before - adapters.num_bytes == own_bytes
    assert digest not in adapters.digests
    assert fleet.load("attention only", fleet.root) == own_bytes
    assert adapters.num_bytes == before


def test_loading_and_unloading_others_never_changes_a_running_sequence(fleet: Fleet, prompt: Any) -> None:
    tokens = prompt(20)
    expected = fleet.harness.generate([fleet.sequence("plain", tokens)], 24)[0]
    running, others = fleet.sequence("plain", tokens), ["rsLoRA", "all-linear", "some layers"]
    for step in range(24):
        fleet.harness.step([running])
        fleet.harness.runner.adapters.unload(Digest(fleet.digests[others[step % 3]]))
        fleet.load(others[(step + 1) % 3], fleet.root)
    assert running.token_ids[20:] == expected
    fleet.harness.release(running)
    for other in others:
        fleet.load(other, fleet.root)


def test_a_sequence_whose_adapter_is_not_loaded_fails_alone(fleet: Fleet, prompt: Any) -> None:
    sequences = [fleet.harness.sequence(prompt(6), adapter="f" * 32), fleet.sequence(None, prompt(6))]
    missing, present = fleet.harness.step(sequences)
    assert missing.error is not None
    assert missing.error.code == "model_not_found"
    assert present.error is None
    for sequence in sequences:
        fleet.harness.release(sequence)


def test_an_adapter_of_another_base_is_refused(
    fleet: Fleet, tiny_model: Callable[..., Any], bind: Callable[..., Any]
) -> None:
    directory = fleet.root / "checkpoints" / fleet.digests["plain"]
    wider = bind(tiny_model("Llama", vocab_size=259, hidden_size=96, head_dim=16, num_attention_heads=6))
    with pytest.raises(AdapterMismatch, match=r"q_proj.*trained for another base"):
        wider.runner.adapters.load(Digest("a" * 32), load_directory(directory, "cpu"))
    shallower = bind(tiny_model("Llama", vocab_size=259, num_hidden_layers=2))
    with pytest.raises(AdapterMismatch, match=r"model\.layers\.2"):
        shallower.runner.adapters.load(Digest("a" * 32), load_directory(directory, "cpu"))
    assert shallower.runner.adapters.digests == ()


def test_a_bfloat16_base_takes_a_float32_adapter(
    fleet: Fleet, tiny_model: Callable[..., Any], bind: Callable[..., Any], prompt: Any
) -> None:
    """Bound: the root mean square error against float32 is at most twice that of the bfloat16 base itself."""
    harness, tokens = bind(tiny_model("Llama", vocab_size=259, dtype=torch.bfloat16)), prompt(40)
    directory = fleet.root / "checkpoints" / fleet.digests["plain"]
    harness.runner.adapters.load(Digest("a" * 32), load_directory(directory, "cpu"))
    error = (harness.logits(tokens, adapter="a" * 32) - fleet.oracle("plain", tokens)).square().mean().sqrt()
    base_error = (harness.logits(tokens) - fleet.oracle(None, tokens)).square().mean().sqrt()
    assert error <= 2 * base_error

"""A PEFT adapter becomes a draft that means what peft means, or is refused saying why."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.types import WEIGHTS_NAME, Manifest
from nearline.protocol import CheckpointKind, Digest
from nearline.protocol.errors import AdapterMismatch, CheckpointCorrupt, NearlineError, NotFound, UnsupportedCheckpoint
from tests.checkpoint_store.sources import edit_json, import_model, leftovers, published, read_raw, write_raw

torch.set_num_threads(1)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WEIGHTS = "adapter_model.safetensors"
KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"


@pytest.fixture(scope="module")
def base_dir(tiny_llama_dir: Callable[..., Path]) -> Path:
    return tiny_llama_dir()


@pytest.fixture
def base(root: Path, base_dir: Path) -> Digest:
    """The base model, imported; only then may an adapter come."""
    return import_model(root, base_dir).digest


@pytest.fixture
def make(base_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """Save a random adapter with peft; keywords are LoraConfig's."""

    def save(seed: int = 0, **settings: Any) -> Path:
        model = AutoModelForCausalLM.from_pretrained(base_dir)
        adapted = get_peft_model(model, LoraConfig(**({"task_type": "CAUSAL_LM", "target_modules": ALL} | settings)))
        torch.manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        directory = tmp_path / f"adapter-{seed}"
        adapted.save_pretrained(directory)
        return directory

    return save


def import_adapter(root: Path, source: Path, base: Digest | None, warnings: list[str] | None = None) -> Manifest:
    reporter = Reporter(warn=[].append if warnings is None else warnings.append)
    return import_checkpoint(root, CheckpointKind.ADAPTER, str(source), base, reporter)


def refused(root: Path, source: Path, base: Digest | None, error: type[NearlineError]) -> str:
    before = leftovers(root)
    with pytest.raises(error) as caught:
        import_adapter(root, source, base)
    assert leftovers(root) == before
    return caught.value.message


def deltas(directory: Path) -> dict[str, torch.Tensor]:
    """What our files say each base weight changes by: scaling · B A, read by the layout's own words."""
    modules = json.loads((directory / "adapter.json").read_text())["modules"]
    raw = read_raw(directory / WEIGHTS_NAME)
    assert raw["matrices"][0] == "F32"
    sites = np.frombuffer(raw["sites"][2], np.int64).reshape(raw["sites"][1])
    result = {}
    for row, (at_a, at_b, _gain, _shift, rank, num_in, num_out) in enumerate(sites.tolist()):
        if not rank:
            continue
        a, b = (
            np.frombuffer(raw["matrices"][2], np.float32, rank * width, at).reshape(rank, width)
            for at, width in ((at_a, num_in), (at_b, num_out))
        )
        name = site_name(row)
        assert modules[name]["rank"] == rank
        result[name] = torch.from_numpy(b.T @ a)
    assert result.keys() == {name for name, module in modules.items() if module["rank"]}
    return result


def site_name(row: int) -> str:
    projection = ALL[row % 7]
    return f"model.layers.{row // 7}.{'self_attn' if row % 7 < 4 else 'mlp'}.{projection}"


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 16},
    "rslora": {"r": 4, "lora_alpha": 16, "use_rslora": True},
    "patterns": {
        "r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6, "^o_proj": 3},
        "alpha_pattern": {r"model\.layers\.0\..*": 3, "v_proj": 5},
    },
    "rslora with patterns": {"r": 4, "use_rslora": True, "rank_pattern": {"down_proj": 1}},
    "regex": {"r": 2, "target_modules": r".*layers\.0.*\.(q|v)_proj"},
    "all-linear": {"r": 2, "target_modules": "all-linear"},
    "one layer": {"r": 2, "layers_to_transform": [1], "exclude_modules": ["k_proj"]},
}  # fmt: skip


@pytest.mark.parametrize("kind", SETTINGS)
def test_ranks_and_scalings_are_pefts(
    root: Path, base: Digest, base_dir: Path, make: Callable[..., Path], kind: str
) -> None:
    source = make(**SETTINGS[kind])
    manifest = import_adapter(root, source, base)
    ours = deltas(published(root, manifest))
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_dir), source)
    layers = {n.removeprefix("base_model.model."): m for n, m in peft.named_modules() if hasattr(m, "get_delta_weight")}
    assert ours.keys() == layers.keys()
    for name, layer in layers.items():
        torch.testing.assert_close(ours[name], layer.get_delta_weight("default").detach(), rtol=1e-5, atol=1e-6)
    assert manifest.info.rank == max(module.r["default"] for module in layers.values())


def test_an_adapters_info_names_its_base_and_its_files(root: Path, base: Digest, make: Callable[..., Path]) -> None:
    source = make(r=4)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    info = import_adapter(root, source, base).info
    assert (info.kind, info.base_digest, info.rank, info.dtype) == (CheckpointKind.ADAPTER, base, 4, "float32")
    assert (info.family, info.architecture) == ("llama", "LlamaForCausalLM")
    assert info.files == ("adapter.json", "adapter_config.json", "chat_template.jinja")
    (source / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    assert import_adapter(root, source, base).info.files == info.files
    (source / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert import_adapter(root, source, base).info.files == (*info.files, "tokenizer_config.json")


def test_matrices_lie_in_execution_order_those_of_one_input_together_in_the_bases_dtype(
    root: Path, base: Digest, make: Callable[..., Path]
) -> None:
    source = make(r=2)
    raw = read_raw(source / WEIGHTS)
    half = {name: ("BF16", shape, data[: len(data) // 2]) for name, (_, shape, data) in raw.items()}
    quiet = {name: (dtype, shape, b"\x12\x3f" * (len(data) // 2)) for name, (dtype, shape, data) in half.items()}
    write_raw(source / WEIGHTS, dict(sorted(quiet.items(), reverse=True)))
    manifest = import_adapter(root, source, base)
    assert [(entry.name, entry.dtype) for entry in manifest.tensors] == [("matrices", "F32"), ("sites", "I64")]
    assert manifest.info.dtype == "float32"
    sites = np.frombuffer(read_raw(published(root, manifest) / WEIGHTS_NAME)["sites"][2], np.int64).reshape(-1, 7)
    groups = [(0, 1, 2), (3,), (4, 5), (6,)]
    order = [sites[7 * layer + i, side] for layer in (0, 1) for group in groups for side in (0, 1) for i in group]
    assert order == sorted(order)
    assert sites[1, 0] == sites[0, 0] + 2 * 64 * 4, "A of k follows A of q"


def test_numbers_beyond_the_bases_dtype_are_refused(
    root: Path, base: Digest, base_dir: Path, make: Callable[..., Path], tmp_path: Path
) -> None:
    half = AutoModelForCausalLM.from_pretrained(base_dir).to(torch.float16)
    half.save_pretrained(tmp_path / "half")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "half" / name).write_bytes((base_dir / name).read_bytes())
    half_base, source = import_model(root, tmp_path / "half").digest, make(r=2)
    change(source, B=f32(64, 2, fill=1e6))
    assert "do not fit the base's dtype F16" in refused(root, source, half_base, CheckpointCorrupt)
    edit_json(source / "adapter_config.json", lora_alpha=1e300)
    assert "scaled by lora_alpha or alpha_pattern, do not" in refused(root, source, base, CheckpointCorrupt)


def test_the_same_adapter_for_another_base_is_another_checkpoint(
    root: Path, base: Digest, make: Callable[..., Path], tiny_llama_dir: Callable[..., Path]
) -> None:
    source = make(r=2)
    other = import_model(root, tiny_llama_dir(seed=1)).digest
    assert import_adapter(root, source, base).digest != import_adapter(root, source, other).digest
    assert import_adapter(root, source, base) == import_adapter(root, source, base)


def test_an_adapter_whose_b_is_still_zero_is_served(root: Path, base: Digest, make: Callable[..., Path]) -> None:
    source = make(r=2)
    raw = read_raw(source / WEIGHTS)
    raw |= {name: (d, s, bytes(len(x))) for name, (d, s, x) in raw.items() if ".lora_B." in name}
    write_raw(source / WEIGHTS, raw)
    assert all(not delta.any() for delta in deltas(published(root, import_adapter(root, source, base))).values())


# ---- what is refused ----


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["k_proj"]}, {"target_modules": ".*k_proj"}, {"exclude_modules": ["q_proj"]},
        {"exclude_modules": r".*\.1\..*"}, {"layers_to_transform": 0},
        {"layers_to_transform": [0], "layers_pattern": "layers"}, {"layers_to_transform": [1], "layers_pattern": ["x"]},
    ],
)  # fmt: skip
def test_weights_that_peft_would_not_load_are_refused(
    root: Path, base: Digest, make: Callable[..., Path], changes: dict[str, Any]
) -> None:
    source = make(r=2, target_modules=["q_proj"])
    edit_json(source / "adapter_config.json", **changes)
    said = "self_attn.q_proj' has LoRA, but adapter_config.json does not name it (target_modules"
    assert said in refused(root, source, base, AdapterMismatch)


def test_a_magnitude_without_dora_and_dora_without_magnitude_are_refused(
    root: Path, base: Digest, make: Callable[..., Path]
) -> None:
    plain, dora = make(r=2), make(seed=1, r=2, use_dora=True)
    edit_json(plain / "adapter_config.json", use_dora=True)
    edit_json(dora / "adapter_config.json", use_dora=False)
    assert "has no magnitude, adapter_config.json says DoRA" in refused(root, plain, base, AdapterMismatch)
    assert "has a magnitude, adapter_config.json says no DoRA" in refused(root, dora, base, AdapterMismatch)


def test_a_bias_or_magnitude_the_base_has_no_place_for_is_refused(
    root: Path, base: Digest, make: Callable[..., Path]
) -> None:
    source = make(r=2, use_dora=True)
    weights, name = read_raw(source / WEIGHTS), KEY.format("A").removesuffix(".lora_A.weight")
    write_raw(source / WEIGHTS, weights | {f"{name}.base_layer.bias": f32(64)})
    assert "has a trained bias, the base has none there" in refused(root, source, base, AdapterMismatch)
    write_raw(source / WEIGHTS, weights | {f"{name}.lora_magnitude_vector": f32(32)})
    assert "magnitude_vector of (32,); the base's weight is (64, 64)" in refused(root, source, base, AdapterMismatch)
    write_raw(source / WEIGHTS, weights | {f"{name}.lora_magnitude_vector": f32(64, fill=float("nan"))})
    assert "holds NaN or infinity" in refused(root, source, base, CheckpointCorrupt)


def test_an_extended_vocabulary_is_refused_with_both_sizes(root: Path, base: Digest, make: Callable[..., Path]) -> None:
    for table in ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.base_layer.weight"):
        source = make(r=2)
        write_raw(source / WEIGHTS, read_raw(source / WEIGHTS) | {table: f32(275, 64)})
        message = refused(root, source, base, UnsupportedCheckpoint)
        assert "has 275 tokens, the base 272" in message


def with_tokenizer(source: Path, base_dir: Path, *added: str, **settings: Any) -> Path:
    """Save the base's tokenizer beside the adapter, as trainers do, after adding tokens to it."""
    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    tokenizer.add_tokens(list(added))
    for name, token in settings.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(source)
    return source


def test_adapters_with_tokens_of_their_own_within_a_padded_vocabulary_are_refused_naming_them(
    root: Path, tiny_llama_dir: Callable[..., Path], make: Callable[..., Path]
) -> None:
    """No shape shows them: the base has more rows than its tokenizer has tokens."""
    base_dir = tiny_llama_dir(vocab_size=288)
    num_known = len(AutoTokenizer.from_pretrained(base_dir))
    assert num_known < 288
    padded = import_model(root, base_dir).digest
    tables = {"base_model.model.model.embed_tokens.weight": f32(288, 64)}
    for token in ("<|pirate|>", "<|poet|>"):
        source = with_tokenizer(make(r=2), base_dir, token)
        write_raw(source / WEIGHTS, read_raw(source / WEIGHTS) | tables)
        said = f"adds '{token}' (id {num_known})"
        assert said in refused(root, source, padded, UnsupportedCheckpoint)
        for path in source.glob("*token*"):
            path.unlink()
        (source / "added_tokens.json").write_text(json.dumps({token: num_known}))
        assert said in refused(root, source, padded, UnsupportedCheckpoint), "the older way to save them"


def test_the_bases_own_tokenizer_and_a_pad_token_beside_an_adapter_refuse_nothing(
    root: Path, base: Digest, base_dir: Path, make: Callable[..., Path]
) -> None:
    import_adapter(root, with_tokenizer(make(r=2), base_dir), base)
    import_adapter(root, with_tokenizer(make(seed=1, r=2), base_dir, pad_token="[PAD]"), base)


def test_a_replaced_module_other_than_embedding_and_head_is_refused_by_name(
    root: Path, base: Digest, make: Callable[..., Path]
) -> None:
    source = make(r=2)
    edit_json(source / "adapter_config.json", modules_to_save=["lm_head", "norm"])
    assert "replaces norm (modules_to_save)" in refused(root, source, base, UnsupportedCheckpoint)
    edit_json(source / "adapter_config.json", modules_to_save=["lm_head"])
    assert "that lm_head is replaced whole (modules_to_save), but" in refused(root, source, base, AdapterMismatch)


def test_dora_on_the_head_is_refused(root: Path, base: Digest, make: Callable[..., Path]) -> None:
    source = make(r=2, target_modules=["lm_head"], use_dora=True)
    assert "lm_head" in refused(root, source, base, UnsupportedCheckpoint)


def change(source: Path, **changes: Any) -> None:
    raw: dict[str, Any] = {**read_raw(source / WEIGHTS), **{KEY.format(side): raw for side, raw in changes.items()}}
    write_raw(source / WEIGHTS, {name: value for name, value in raw.items() if value is not None})


def f32(*shape: int, fill: float = 1.0) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", shape, np.full(shape, fill, np.float32).tobytes()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"A": f32(2, 32)}, AdapterMismatch, "has A (2, 32) and B (64, 2); the base's weight is (64, 64)"),
        ({"B": f32(32, 2)}, AdapterMismatch, "needs A (r, 64) and B (64, r)"),
        ({"A": f32(8, 64), "B": f32(64, 8)}, AdapterMismatch, "has rank 8, adapter_config.json says 2"),
        ({"A": f32(0, 64), "B": f32(64, 0)}, AdapterMismatch, "has A (0, 64)"),
        ({"A": f32()}, AdapterMismatch, "has A ()"),
        ({"B": None}, AdapterMismatch, "has lora_A but no lora_B"),
        ({"A": None}, AdapterMismatch, "has lora_B but no lora_A"),
        ({"A": f32(2, 64, fill=float("nan"))}, CheckpointCorrupt, "holds NaN or infinity"),
        ({"B": f32(64, 2, fill=float("-inf"))}, CheckpointCorrupt, "holds NaN or infinity"),
        ({"A": ("F16", (2, 64), b"\x00\x7c" * 128)}, CheckpointCorrupt, "holds NaN or infinity"),
        ({"A": ("BF16", (2, 64), b"\xc0\x7f" * 128)}, CheckpointCorrupt, "holds NaN or infinity"),
        ({"A": ("I8", (2, 64), b"\x01" * 128)}, UnsupportedCheckpoint, "is I8; save it as F32, F16 or BF16"),
    ],
)
def test_weights_that_do_not_fit_the_base_are_refused_with_their_numbers(
    root: Path, base: Digest, make: Callable[..., Path], changes: dict[str, Any], error: Any, words: str
) -> None:
    source = make(r=2, target_modules=["q_proj"])
    change(source, **changes)
    message = refused(root, source, base, error)
    assert words in message
    assert "model.layers.1.self_attn.q_proj" in message


def test_a_layer_the_base_does_not_have_is_refused(root: Path, base: Digest, make: Callable[..., Path]) -> None:
    source = make(r=2, target_modules=["q_proj"])
    raw = read_raw(source / WEIGHTS)
    write_raw(source / WEIGHTS, {name.replace("layers.1.", "layers.7."): value for name, value in raw.items()})
    message = refused(root, source, base, AdapterMismatch)
    assert "'model.layers.7.self_attn.q_proj', but the base" in message
    assert "has layers 0 to 1" in message


def test_an_adapter_that_changes_nothing_is_refused(root: Path, base: Digest, make: Callable[..., Path]) -> None:
    source = make(r=2)
    write_raw(source / WEIGHTS, {})
    assert "changes no module at all" in refused(root, source, base, AdapterMismatch)


def test_a_pickled_or_missing_or_torn_weights_file_is_refused(
    root: Path, base: Digest, make: Callable[..., Path]
) -> None:
    source = make(r=2)
    blob = (source / WEIGHTS).read_bytes()
    (source / WEIGHTS).write_bytes(blob[:-1])
    assert "truncated" in refused(root, source, base, CheckpointCorrupt)
    (source / WEIGHTS).unlink()
    assert f"no {WEIGHTS}" in refused(root, source, base, UnsupportedCheckpoint)
    (source / "adapter_model.bin").write_bytes(b"pickle")
    assert "only adapter_model.bin, a pickle" in refused(root, source, base, UnsupportedCheckpoint)


def test_an_adapter_needs_a_base_that_is_a_stored_model(
    root: Path, base: Digest, base_dir: Path, make: Callable[..., Path], tmp_path: Path
) -> None:
    source = make(r=2)
    assert "name its base" in refused(root, source, None, AdapterMismatch)
    for unknown in ("0" * 32, "../x", ""):
        assert "import the base model first" in refused(root, source, Digest(unknown), NotFound)
    adapter = import_adapter(root, source, base).digest
    assert "is an adapter itself" in refused(root, source, adapter, AdapterMismatch)
    assert "it looks like a model" in refused(root, base_dir, base, UnsupportedCheckpoint)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert "not as GGUF files" in refused(root, tmp_path / "a.gguf", base, UnsupportedCheckpoint)


def test_settings_of_a_later_peft_are_warned_about(root: Path, base: Digest, make: Callable[..., Path]) -> None:
    source = make(r=2)
    edit_json(source / "adapter_config.json", brand_new_feature={"x": 1}, another=False)
    warnings: list[str] = []
    import_adapter(root, source, base, warnings)
    assert [w for w in warnings if w.endswith("ignored: brand_new_feature")]


def test_names_with_an_adapter_suffix_or_without_peft_prefix_are_read(
    root: Path, base: Digest, make: Callable[..., Path], tmp_path: Path
) -> None:
    source = make(r=2, alpha_pattern={"q_proj": 5})
    wanted = import_adapter(root, source, base)
    raw = read_raw(source / WEIGHTS)
    for number, (old, new) in enumerate([(".weight", ".default.weight"), ("base_model.model.", "")]):
        other = tmp_path / f"renamed-{number}"
        shutil.copytree(source, other)
        write_raw(other / WEIGHTS, {name.replace(old, new): value for name, value in raw.items()})
        assert import_adapter(root, other, base).digest == wanted.digest


def test_a_base_whose_projections_are_not_llamas_is_refused_with_the_cure(
    root: Path, tmp_path: Path, make: Callable[..., Path], tiny_tokenizer_json: dict[str, Any]
) -> None:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=259)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json))
    base = import_model(root, tmp_path / "gpt2").digest
    with pytest.raises(UnsupportedCheckpoint, match=r"GPT2LMHeadModel.*merge_and_unload"):
        import_adapter(root, make(), base)

"""Whatever stands in an adapter_config.json: the adapter means what peft makes of it, or the field is named."""

import contextlib
import copy
import io
import json
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from transformers import AutoModelForCausalLM

from nearline.checkpoint_store.adapter_config import read_settings
from nearline.checkpoint_store.convert import import_checkpoint
from nearline.checkpoint_store.convert_types import Reporter
from nearline.protocol import CheckpointKind, Digest
from nearline.protocol.errors import InvalidRequest, UnsupportedCheckpoint
from tests.checkpoint_store.sources import import_model, published
from tests.checkpoint_store.test_adapter import deltas

MEANING = (
    "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "modules_to_save", "init_lora_weights", "fan_in_fan_out", "bias",
)  # fmt: skip
NO_MEANING = (
    "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "runtime_config",
)  # fmt: skip
REFUSED = (
    "trainable_token_indices", "lora_bias", "target_parameters", "layer_replication", "alora_invocation_tokens",
    "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config",
    "ensure_weight_tying", "peft_type",
)  # fmt: skip
PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
NAMES = st.sampled_from([
    "q_proj", "k_proj", "o_proj", "proj", "lm_head", "embed_tokens", "all-linear", "ALL-LINEAR", ".*", ".*q_proj",
    r".*\.1\..*", "model.layers.0.self_attn.q_proj", "layers", "self_attn", "(", "*", "a{99999999999}", "(?i)q_proj",
    "gaussian", "orthogonal", "eva", "pissa", "true", "none", "all", "", "\ud800",
])  # fmt: skip
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.integers() | st.floats() | NAMES | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PROMISING = (
    st.lists(NAMES, max_size=3) | st.dictionaries(NAMES, st.integers(0, 5) | st.floats(0, 9), max_size=2)
    | st.lists(st.integers(0, 2), max_size=2) | st.integers(0, 5)
)  # fmt: skip
PYTHON_WORDS = re.compile(r"Error\b|Traceback|object is not|has no attribute|unsupported operand|NoneType|Input should")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "initialised by pissa_niter_4, which also changes the base"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only adapters of type LORA are served"),
        ({"peft_type": None}, "peft_type is null; only"),
        ({"r": 0}, "r is 0; expected a whole number of at least 1"),
        ({"r": 8.0}, "r is 8.0; expected a whole number of at least 1"),
        ({"r": "four"}, "r is 'four'; expected a whole number of at least 1"),
        ({"r": True}, "r is true; expected a whole number"),
        ({"lora_alpha": None}, "lora_alpha is null; expected a finite number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is NaN; expected a finite number"),
        ({"rank_pattern": {"(": 4}}, 'rank_pattern is {"(": 4}; it holds an invalid regular expression'),
        ({"rank_pattern": {"q_proj": 0}}, "expected an object of patterns and ranks of at least 1"),
        ({"alpha_pattern": [3]}, "alpha_pattern is [3]; expected an object of patterns and finite numbers"),
        ({"target_modules": 5}, "target_modules is 5; expected a list of names, or a pattern as text"),
        ({"target_modules": None}, "target_modules is null; expected a list"),
        ({"target_modules": "(q_proj"}, "target_modules is '(q_proj'; it holds an invalid regular expression"),
        ({"layers_to_transform": "x"}, "layers_to_transform is 'x'; expected the number of a layer, or a list of them"),
        ({"layers_pattern": "layers"}, "layers_pattern is set, but not layers_to_transform"),
        ({"target_modules": "all-linear", "layers_to_transform": 1}, "layers_to_transform is 1, which needs"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'; expected a list of names"),
        (
            {"init_lora_weights": "brand_new"},
            "init_lora_weights is 'brand_new'; expected true, false or one of gaussian",
        ),
        ({"init_lora_weights": "true"}, "init_lora_weights is 'true'; expected true, false or one of"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'; expected true or false"),
        ({"bias": "some"}, "bias is 'some'; expected none, all or lora_only"),
    ],
)
def test_a_feature_that_is_not_served_and_a_value_that_cannot_be_meant_are_named(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint) as caught:
        read_settings(PLAIN | changes, Reporter(warn=lambda _: None))
    assert words in caught.value.message


def test_target_modules_and_the_type_must_be_there() -> None:
    for field, expected in (
        ("target_modules", "expected a list of names"),
        ("peft_type", "only adapters of type LORA"),
    ):
        config = {name: value for name, value in PLAIN.items() if name != field}
        with pytest.raises(UnsupportedCheckpoint, match=f"adapter_config.json: {field} is missing; {expected}"):
            read_settings(config, Reporter(warn=lambda _: None))


def test_a_missing_rank_or_alpha_is_what_peft_takes_for_it() -> None:
    name = "model.layers.0.self_attn.q_proj"
    for field in ("r", "lora_alpha"):
        config = {name: value for name, value in PLAIN.items() if name != field}
        ours, theirs = read_settings(config, Reporter()), LoraConfig.from_peft_type(**config)
        assert (ours.rank(name), ours.scaling(name)) == (theirs.r, theirs.lora_alpha / theirs.r)


@pytest.mark.parametrize("field", NO_MEANING)
def test_a_field_that_says_nothing_about_what_the_adapter_computes_refuses_and_warns_of_nothing(field: str) -> None:
    warnings: list[str] = []
    for value in (7, "x", {"x": [1]}, [None], True):
        read_settings(PLAIN | {field: value}, Reporter(warn=warnings.append))
    assert warnings == []


class Wild:
    """One adapter, on q and o of two layers, whose config is changed again and again."""

    def __init__(self, directory: Path, base_dir: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(base_dir)
        self.root, self.source = directory / "store", directory / "adapter"
        self.base: Digest = import_model(self.root, base_dir).digest
        adapted = get_peft_model(
            copy.deepcopy(self.model), LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "o_proj"])
        )
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(self.source)
        self.config: dict[str, Any] = json.loads((self.source / "adapter_config.json").read_text())

    def write(self, config: dict[str, Any]) -> None:
        (self.source / "adapter_config.json").write_text(json.dumps(config))

    def ours(self) -> dict[str, torch.Tensor]:
        reporter = Reporter(warn=lambda _: None)
        manifest = import_checkpoint(self.root, CheckpointKind.ADAPTER, str(self.source), self.base, reporter)
        return deltas(published(self.root, manifest))

    def theirs(self) -> dict[str, torch.Tensor]:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            peft = PeftModel.from_pretrained(copy.deepcopy(self.model), self.source)
        layers = {name: one for name, one in peft.named_modules() if hasattr(one, "get_delta_weight")}
        found = {n.removeprefix("base_model.model."): x.get_delta_weight("default") for n, x in layers.items()}
        return {name: delta.detach() for name, delta in found.items() if delta.any()}


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Callable[..., Path]) -> Wild:
    return Wild(tmp_path_factory.mktemp("wild"), tiny_llama_dir())


def outcome(work: Callable[[], Any]) -> tuple[Any, str]:
    """What comes of it, or None and why it was refused."""
    try:
        return work(), ""
    except InvalidRequest as refusal:
        return None, refusal.message


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(st.sampled_from(MEANING + NO_MEANING), ANY_JSON | PROMISING)
@example("target_modules", 5)
@example("layers_to_transform", "x")
@example("layers_to_transform", [0, 1])
@example("rank_pattern", {"k_proj": 7})
@example("alpha_pattern", {r"model\.layers\.0\..*": 3, "o_proj": 0.5})
@example("alpha_pattern", {"(?i)q_proj": 3})
@example("lora_alpha", 10**400)
@example("lora_alpha", 1e300)
@example("lora_alpha", True)
@example("target_modules", r".*layers\.\d\.self_attn\.[qo]_proj")
@example("target_modules", "All-Linear")
@example("modules_to_save", ["embed_tokens"])
@example("init_lora_weights", "gaussian")
@example("revision", "\ud800")
def test_any_value_of_a_field_gives_what_peft_gives_or_a_refusal_that_names_the_field(
    wild: Wild, field: str, value: Any
) -> None:
    wild.write(wild.config | {field: value})
    ours, refusal = outcome(wild.ours)
    if ours is None:
        assert field in refusal
        assert field not in NO_MEANING
        assert not PYTHON_WORDS.search(refusal)
        return
    if value is None or field in NO_MEANING:
        wild.write({name: one for name, one in wild.config.items() if name != field})
    theirs = wild.theirs()
    ours = {name: delta for name, delta in ours.items() if delta.any()}
    assert ours.keys() == theirs.keys()
    for name, delta in ours.items():
        torch.testing.assert_close(delta, theirs[name], rtol=1e-4, atol=1e-6)


def peft_has(config: dict[str, Any], name: str) -> bool:
    """Whether peft would change the module of this name, if it is linear and no head where all are meant."""
    fields = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")
    theirs = LoraConfig(**{field: config[field] for field in fields if field in config})
    if str(theirs.target_modules).lower() == "all-linear":
        theirs.target_modules = {"q_proj", "up_proj"}
    return bool(check_target_module_exists(theirs, name))


@settings(max_examples=600, deadline=None)
@given(
    st.dictionaries(st.sampled_from(MEANING + NO_MEANING + REFUSED), ANY_JSON | PROMISING, min_size=1, max_size=4)
    | st.dictionaries(st.text(max_size=8), ANY_JSON, max_size=3)
)
def test_no_config_raises_anything_but_a_refusal_that_names_a_field(changes: dict[str, Any]) -> None:
    config = PLAIN | changes
    found, refusal = outcome(lambda: read_settings(json.loads(json.dumps(config)), Reporter(warn=lambda _: None)))
    if found is None:
        assert any(name in refusal for name in MEANING + NO_MEANING + REFUSED)
    else:
        assert math.isfinite(found.scaling("model.layers.0.self_attn.q_proj"))
        for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "lm_head"):
            assert found.targets.has(name) == peft_has(config, name), name

"""What an adapter_config.json of PEFT asks for: ranks, scalings, and everything we refuse rather than ignore. Pure.

Source: LoraConfig of peft 0.21; a field of a later version that is set and unknown here is warned about.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nearline.checkpoint_store.adapter_targets import Targets
from nearline.checkpoint_store.convert_types import Reporter
from nearline.protocol.adapter_layout import TABLES
from nearline.protocol.errors import UnsupportedCheckpoint

_REFUSED = {
    "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
    "lora_bias": "a bias in B (lora_bias)",
    "target_parameters": "LoRA on bare parameters (target_parameters)",
    "layer_replication": "replicated layers (layer_replication)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "use_qalora": "QA-LoRA (use_qalora)",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "arrow_config": "Arrow routing (arrow_config)",
    "kasa_config": "KaSA (kasa_config)",
    "velora_config": "VeLoRA (velora_config)",
    "monteclora_config": "Monte-Carlo LoRA (monteclora_config)",
    "ensure_weight_tying": "tied changes of embedding and head (ensure_weight_tying)",
}
_IGNORED = (
    "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "runtime_config",
)  # fmt: skip
"""Fields that say how it was trained or where it lies, and change nothing of what it computes, whatever they hold."""
_SERVED_INITS = ("gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base's weights as they are."""
_BASE_CHANGING_INITS = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""How the names of those begin that change the base's weights: the adapter is for a base that nobody has."""
_PEFT_R, _PEFT_ALPHA = 8, 8.0
_MAX_SHOWN = 100

_Names = list[str] | str
_Rank = Annotated[int, Field(ge=1)]
_Alpha = Annotated[float, Field(allow_inf_nan=False)]
_A_LIST_OR_PATTERN = "a list of names, or a pattern as text"
_A_SWITCH = "true or false"


class _Config(BaseModel):
    """The fields of an adapter_config.json that mean something here, by the JSON types that peft saves; null: not set.

    Where one is missing peft's default counts. What it takes for target_modules depends on its version and the model's
    type, so they must be there."""

    model_config = ConfigDict(strict=True, extra="ignore")

    r: int = Field(_PEFT_R, ge=1, description="a whole number of at least 1")
    lora_alpha: float = Field(_PEFT_ALPHA, allow_inf_nan=False, description="a finite number")
    target_modules: _Names = Field(description=f"{_A_LIST_OR_PATTERN}: name the modules that were trained")
    exclude_modules: _Names | None = Field(None, description=_A_LIST_OR_PATTERN)
    modules_to_save: list[str] | None = Field(None, description="a list of names")
    layers_to_transform: list[int] | int | None = Field(None, description="the number of a layer, or a list of them")
    layers_pattern: _Names | None = Field(None, description=_A_LIST_OR_PATTERN)
    rank_pattern: dict[str, _Rank] | None = Field(None, description="an object of patterns and ranks of at least 1")
    alpha_pattern: dict[str, _Alpha] | None = Field(None, description="an object of patterns and finite numbers")
    init_lora_weights: bool | str | None = Field(None, description=f"true, false or one of {', '.join(_SERVED_INITS)}")
    use_rslora: bool | None = Field(None, description=_A_SWITCH)
    use_dora: bool | None = Field(None, description=_A_SWITCH)
    fan_in_fan_out: bool | None = Field(None, description=_A_SWITCH)
    bias: Literal["none", "all", "lora_only"] | None = Field(None, description="none, all or lora_only")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Rank and scaling of each module: defaults, overridden by the first pattern that matches its name."""

    r: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: Targets

    def rank(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scaling(self, module: str) -> float:
        """alpha/r, or alpha/√r for rank-stabilised LoRA."""
        rank, alpha = self.rank(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_settings(config: Mapping[str, Any], reporter: Reporter) -> LoraSettings:
    """Read a config. Raises UnsupportedCheckpoint naming the first field whose value is not served, or cannot be."""
    if config.get("peft_type") != "LORA":
        raise UnsupportedCheckpoint(f"{_said('peft_type', config)}; only adapters of type LORA are served")
    for field, feature in _REFUSED.items():
        if config.get(field):
            raise UnsupportedCheckpoint(f"the adapter uses {feature}, which is not served; train it without")
    try:
        found = _Config.model_validate(config)
    except ValidationError as error:
        raise _complaint(str(error.errors()[0]["loc"][0]), config) from None
    _check(found, config)
    known = {*_Config.model_fields, *_REFUSED, *_IGNORED, "peft_type"}
    unknown = sorted(name for name, value in config.items() if value and name not in known)
    if unknown:
        reporter.warn(f"settings of adapter_config.json that are not known here were ignored: {', '.join(unknown)}")
    layers, patterns = found.layers_to_transform, found.layers_pattern or ()
    return LoraSettings(
        r=found.r,
        alpha=found.lora_alpha,
        use_rslora=bool(found.use_rslora),
        use_dora=bool(found.use_dora),
        rank_pattern=found.rank_pattern or {},
        alpha_pattern=found.alpha_pattern or {},
        targets=Targets(
            found.target_modules,
            found.exclude_modules or (),
            found.modules_to_save or (),
            [layers] if isinstance(layers, int) else layers or (),
            [patterns] if isinstance(patterns, str) else patterns,
        ),
    )


def _complaint(field: str, config: Mapping[str, Any]) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(f"{_said(field, config)}; expected {_Config.model_fields[field].description}")


def _said(field: str, config: Mapping[str, Any]) -> str:
    found = f"is {_shown(config[field])}" if field in config else "is missing"
    return f"adapter_config.json: {field} {found}"


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def _check(found: _Config, config: Mapping[str, Any]) -> None:
    """Refuse what has the right type and cannot be meant, or is not served."""
    whole = [name for name in found.modules_to_save or () if name not in TABLES]
    if whole:
        raise UnsupportedCheckpoint(
            f"the adapter replaces {', '.join(whole)} (modules_to_save), which is not served; only "
            f"{' and '.join(TABLES)} may be replaced whole"
        )
    init = found.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise UnsupportedCheckpoint(
            f"the adapter was initialised by {init.lower()[:_MAX_SHOWN]}, which also changes the base "
            "(init_lora_weights); save it again with path_initial_model_for_weight_conversion to get plain LoRA"
        )
    if isinstance(init, str) and init.lower() not in _SERVED_INITS:
        raise _complaint("init_lora_weights", config)
    for field, patterns in (
        ("rank_pattern", [rf"(.*\.)?({one})$" for one in found.rank_pattern or ()]),
        ("alpha_pattern", [rf"(.*\.)?({one})$" for one in found.alpha_pattern or ()]),
        ("target_modules", _texts(found.target_modules)),
        ("exclude_modules", _texts(found.exclude_modules)),
        ("layers_pattern", [rf"(?:^|.*?\.){one}\.(?P<layer>\d+)\." for one in _listed(found.layers_pattern)]),
    ):
        if not all(map(_compiles, patterns)):
            raise UnsupportedCheckpoint(f"{_said(field, config)}; it holds an invalid regular expression")
    for field in ("layers_to_transform", "layers_pattern"):
        if isinstance(found.target_modules, str) and config.get(field) is not None:
            raise UnsupportedCheckpoint(f"{_said(field, config)}, which needs target_modules to be a list")
    if found.layers_pattern and found.layers_to_transform is None:
        raise UnsupportedCheckpoint("adapter_config.json: layers_pattern is set, but not layers_to_transform")


def _texts(names: _Names | None) -> list[str]:
    return [names] if isinstance(names, str) else []


def _listed(names: _Names | None) -> list[str]:
    return [names] if isinstance(names, str) else names or []


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default

"""What an adapter_config.json of PEFT asks for: ranks, scalings, and everything we refuse rather than ignore. Pure.

Source: LoraConfig of peft 0.21; a field of a later version that is set and unknown here is warned about.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
_REFUSED_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initialisations that also change the base's weights: without those changes the adapter means something else."""
_KNOWN = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "bias", "use_rslora", "init_lora_weights",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_config", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
    "use_dora", "fan_in_fan_out", "modules_to_save",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Rank and scaling of each module: defaults, overridden by the first pattern that matches its name."""

    r: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scaling(self, module: str) -> float:
        """alpha/r, or alpha/√r for rank-stabilised LoRA."""
        rank, alpha = self.rank(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_settings(config: Mapping[str, Any], reporter: Reporter) -> LoraSettings:
    """Read a config. Raises UnsupportedCheckpoint naming the first feature that is not served."""
    if config.get("peft_type") != "LORA":
        raise UnsupportedCheckpoint(f"adapters of type {config.get('peft_type')!r} are not served; only LORA is")
    for field, feature in _REFUSED.items():
        if config.get(field):
            raise UnsupportedCheckpoint(f"the adapter uses {feature}, which is not served; train it without")
    whole = [name for name in config.get("modules_to_save") or () if name not in TABLES]
    if whole:
        raise UnsupportedCheckpoint(
            f"the adapter replaces {', '.join(map(str, whole))} (modules_to_save), which is not served; only "
            f"{' and '.join(TABLES)} may be replaced whole"
        )
    init = str(config.get("init_lora_weights", True)).lower()
    if init.startswith(_REFUSED_INITS):
        raise UnsupportedCheckpoint(
            f"the adapter was initialised by {init}, which also changes the base; save it again with "
            "path_initial_model_for_weight_conversion to get plain LoRA"
        )
    unknown = sorted(name for name, value in config.items() if value and name not in _KNOWN)
    if unknown:
        reporter.warn(f"settings of adapter_config.json that are not known here were ignored: {', '.join(unknown)}")
    return _settings(config)


def _settings(config: Mapping[str, Any]) -> LoraSettings:
    try:
        settings = LoraSettings(
            r=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            use_rslora=bool(config.get("use_rslora")),
            use_dora=bool(config.get("use_dora")),
            rank_pattern={str(key): int(value) for key, value in (config.get("rank_pattern") or {}).items()},
            alpha_pattern={str(key): float(value) for key, value in (config.get("alpha_pattern") or {}).items()},
        )
        for pattern in (*settings.rank_pattern, *settings.alpha_pattern):
            re.compile(pattern)
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise UnsupportedCheckpoint(f"adapter_config.json holds a value we cannot use: {error!r}") from None
    if min([settings.r, *settings.rank_pattern.values()]) < 1:
        raise UnsupportedCheckpoint(f"adapter_config.json asks for rank {settings.r}; a rank is at least 1")
    if not all(math.isfinite(alpha) for alpha in (settings.alpha, *settings.alpha_pattern.values())):
        raise UnsupportedCheckpoint("adapter_config.json holds an alpha that is not finite")
    return settings


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default

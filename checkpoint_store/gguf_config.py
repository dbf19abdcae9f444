"""GGUF metadata becomes the config.json and generation_config.json that transformers would have. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearline.protocol.errors import UnsupportedCheckpoint

Metadata = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How one GGUF architecture maps to transformers. `is_permuted`: q and k rows are interleaved for ggml's rope."""

    architecture: str
    model_type: str
    is_permuted: bool


FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2", False),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3", False),
    "granite": GgufFamily("GraniteForCausalLM", "granite", True),
}
_SCALES = {
    "logit_scale": "logits_scaling", "residual_scale": "residual_multiplier",
    "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier",
}  # fmt: skip
"""Granite's multipliers, by GGUF's name. Other llama-shaped relatives (MiniCPM) have them and mean something else."""


def gguf_family(metadata: Metadata) -> GgufFamily:
    """Look the architecture up. Raises UnsupportedCheckpoint for others, and for one part of a split file."""
    name = metadata.get("general.architecture")
    if int(metadata.get("split.count", 0)) > 1:
        raise UnsupportedCheckpoint("the GGUF file is one part of several; merge them with `llama-gguf-split --merge`")
    family = FAMILIES.get(str(name))
    if family is None:
        known = ", ".join(FAMILIES)
        raise UnsupportedCheckpoint(f"GGUF architecture {name!r} is not supported; supported: {known}")
    return family


def gguf_config(
    metadata: Metadata, vocab_size: int, is_tied: bool, has_attention_bias: bool, rope_factors: Sequence[float] | None
) -> dict[str, Any]:
    """Write the model's config. `rope_factors` are those of a `rope_freqs.weight` tensor, if there is one.

    Raises UnsupportedCheckpoint for a missing field and for what the decoder cannot express.
    """
    family, prefix = gguf_family(metadata), f"{metadata['general.architecture']}."

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(prefix + name, default)
        if value is None:
            raise UnsupportedCheckpoint(f"the GGUF file lacks {prefix + name}; convert the original model again")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedCheckpoint(f"{prefix + name} differs by layer, which is not supported")
            value = value[0]
        return value

    heads, dim = int(field("attention.head_count")), int(field("embedding_length"))
    head_dim = int(field("attention.key_length", field("rope.dimension_count", dim // heads)))
    _refuse_odd_fields(metadata, prefix, head_dim)
    rope = _rope(metadata, prefix, head_dim, rope_factors)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "hidden_size": dim,
        "head_dim": head_dim,
        "intermediate_size": int(field("feed_forward_length")),
        "num_hidden_layers": int(field("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(field("attention.head_count_kv", heads)),
        "max_position_embeddings": int(field("context_length")),
        "rms_norm_eps": float(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "vocab_size": vocab_size,
        "tie_word_embeddings": is_tied,
        "dtype": "bfloat16",
        **special_ids(metadata),
    }
    if family.model_type == "granite":
        config |= {theirs: float(field(ours, 1.0)) for ours, theirs in _SCALES.items()}
    if family.model_type != "qwen2":
        config["attention_bias"] = has_attention_bias
    return config


def special_ids(metadata: Metadata) -> dict[str, int]:
    """Name the special token ids that the file declares."""
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    ids = {f"{ours}_token_id": metadata.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in names.items()}
    return {name: value for name, value in ids.items() if isinstance(value, int)}


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """Write generation_config.json: like config.json's ids, with end-of-turn beside end-of-text."""
    ids: dict[str, Any] = {k: v for k, v in special_ids(metadata).items() if k != "unk_token_id"}
    ends = [ids.get("eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
    known = list(dict.fromkeys(token for token in ends if isinstance(token, int)))
    if len(known) > 1:
        ids["eos_token_id"] = known
    return ids


def _refuse_odd_fields(metadata: Metadata, prefix: str, head_dim: int) -> None:
    if metadata.get(prefix + "expert_count"):
        raise UnsupportedCheckpoint("mixture-of-experts GGUF files are not supported")
    for name in _SCALES if prefix != "granite." else ():
        if metadata.get(prefix + name) not in (None, 0.0, 1.0):
            raise UnsupportedCheckpoint(f"{prefix + name} is not supported; use the original model directory")
    for name in ("attention.value_length", "rope.dimension_count"):
        value = metadata.get(prefix + name)
        if value not in (None, head_dim):
            raise UnsupportedCheckpoint(f"{prefix + name} is {value}, the head size {head_dim}; they must be equal")


def _rope(metadata: Metadata, prefix: str, head_dim: int, factors: Sequence[float] | None) -> dict[str, Any]:
    theta = float(metadata.get(prefix + "rope.freq_base", 10_000.0))
    kind = metadata.get(prefix + "rope.scaling.type", "none")
    factor = metadata.get(prefix + "rope.scaling.factor")
    if factors is not None:
        return {"rope_theta": theta, **_llama3_scaling(theta, head_dim, factors)}
    if kind == "none" or not factor:
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UnsupportedCheckpoint(f"rope scaling {kind!r} of a GGUF file is not supported; use the original model")
    rope = {"rope_theta": theta, "rope_type": kind, "factor": float(factor)}
    original = metadata.get(prefix + "rope.scaling.original_context_length")
    if kind == "yarn" and original:
        rope["original_max_position_embeddings"] = int(original)
    return rope


def _llama3_scaling(theta: float, head_dim: int, factors: Sequence[float]) -> dict[str, Any]:
    """Find the llama3 rope scaling that gives exactly these per-frequency divisors (GGUF keeps only the result).

    Source: the frequency rule published with Llama 3.1; every release uses low 1, high 4 and 8192 positions.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = [_llama3_divisor(theta ** (-2 * i / head_dim), float(max(factors))) for i in range(head_dim // 2)]
    is_same = len(expected) == len(factors) and all(
        math.isclose(ours, theirs, rel_tol=1e-4) for ours, theirs in zip(expected, factors, strict=True)
    )
    if not is_same:
        raise UnsupportedCheckpoint("rope_freqs.weight is no Llama 3 scaling; use the original model directory")
    return scaling


def _llama3_divisor(frequency: float, factor: float) -> float:
    low, high, original = 1.0, 4.0, 8192
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    smooth = (original / wavelength - low) / (high - low)
    return 1.0 / ((1 - smooth) / factor + smooth)

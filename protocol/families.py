"""From a Hugging Face `config.json` to a DecoderSpec: every family is a row of `FAMILIES`, none is a class of its own.

Pure. What a config asks for and the decoder lacks is refused here, by name.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from nearline.protocol.decoder import DecoderSpec, RopeScaling
from nearline.protocol.errors import UnsupportedCheckpoint

Config = Mapping[str, Any]
_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
_ROPE_KINDS = ("llama3", "linear", "dynamic", "yarn")


def decoder_spec(config: Config) -> DecoderSpec:
    """Describe the model of a `config.json`.

    Raises UnsupportedCheckpoint for an unknown architecture, a missing field or a feature we do not run.
    """
    architecture = (config.get("architectures") or ["(none)"])[0]
    family = _generic if architecture in GENERIC else FAMILIES.get(architecture)
    if family is None:
        experts = any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        kind = " (a mixture of experts)" if experts else ""
        known = ", ".join(sorted([*FAMILIES, *GENERIC]))
        raise UnsupportedCheckpoint(f"architecture {architecture!r}{kind} is not supported; supported: {known}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedCheckpoint(f"pre-quantised weights ({method}) are not supported; use the original model")
    try:
        return family(architecture, config)
    except KeyError as missing:
        raise UnsupportedCheckpoint(f"config.json lacks {missing} (architecture {architecture})") from None


def _common(family: str, architecture: str, config: Config) -> dict[str, Any]:
    heads, dim = int(config["num_attention_heads"]), int(config["hidden_size"])
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedCheckpoint(f"activation {activation!r} is not supported; supported: {known}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {
        "family": family,
        "architecture": architecture,
        "num_layers": int(config["num_hidden_layers"]),
        "model_dim": dim,
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or dim // heads),
        "ffn_dim": int(config["intermediate_size"]),
        "vocab_size": int(config["vocab_size"]),
        "max_context_tokens": int(config["max_position_embeddings"]),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        "rope_scaling": _rope_scaling(rope),
        "is_tied": bool(config.get("tie_word_embeddings", False)),
        "activation": activation,
    }


def _rope_scaling(rope: Config) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in _ROPE_KINDS:
        raise UnsupportedCheckpoint(f"rope scaling {kind!r} is not supported; supported: {', '.join(_ROPE_KINDS)}")
    numbers = {k: float(v) for k, v in rope.items() if isinstance(v, (int, float)) and k != "rope_theta"}
    return RopeScaling(kind, tuple(sorted(numbers.items())))


def _sliding(config: Config, num_layers: int) -> dict[str, Any]:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return {}
    kinds = config.get("layer_types")
    if kinds:
        layers = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    else:
        layers = tuple(range(int(config.get("max_window_layers") or 0), num_layers))
    return {"sliding_window": int(window), "sliding_layers": layers} if layers else {}


def _biases(config: Config) -> dict[str, Any]:
    attention, mlp = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    return {"has_qkv_bias": attention, "has_o_bias": attention, "has_mlp_bias": mlp}


def _refuse(config: Config, architecture: str, *switches: str) -> None:
    for switch in switches:
        if config.get(switch):
            raise UnsupportedCheckpoint(f"{architecture} with {switch}={config[switch]!r} is not supported")


def _llama(architecture: str, config: Config) -> DecoderSpec:
    return DecoderSpec(**_common("llama", architecture, config), **_biases(config))


def _mistral(architecture: str, config: Config) -> DecoderSpec:
    common = _common("mistral", architecture, config)
    return DecoderSpec(**common, **_sliding({**config, "max_window_layers": 0}, common["num_layers"]))


def _qwen2(architecture: str, config: Config) -> DecoderSpec:
    common = _common("qwen2", architecture, config)
    sliding = _sliding({"use_sliding_window": False, **config}, common["num_layers"])
    return DecoderSpec(**common, **sliding, has_qkv_bias=True)


def _qwen3(architecture: str, config: Config) -> DecoderSpec:
    common = _common("qwen3", architecture, config)
    common["head_dim"] = int(config.get("head_dim") or 128)
    sliding = _sliding({"use_sliding_window": False, **config}, common["num_layers"])
    return DecoderSpec(**common, **sliding, **_biases(config), has_qk_norm=True)


def _smollm3(architecture: str, config: Config) -> DecoderSpec:
    # transformers ties this family by default, so a saved config may leave the field out.
    common = _common("smollm3", architecture, {"tie_word_embeddings": True, **config})
    kinds = config.get("no_rope_layers") or []
    interval = int(config.get("no_rope_layer_interval") or 4)
    uses_rope = kinds or [(i + 1) % interval for i in range(common["num_layers"])]
    without = tuple(i for i, flag in enumerate(uses_rope) if not flag)
    sliding = _sliding({"use_sliding_window": False, **config}, common["num_layers"])
    return DecoderSpec(**common, **sliding, **_biases(config), no_rope_layers=without)


def _granite(architecture: str, config: Config) -> DecoderSpec:
    scales: dict[str, Any] = {
        "embedding_scale": float(config.get("embedding_multiplier", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "attention_scale": float(config.get("attention_multiplier", 1.0)),
        "logits_scale": 1.0 / float(config.get("logits_scaling", 1.0)),
    }
    return DecoderSpec(**_common("granite", architecture, config), **_biases(config), **scales)


def _olmo2(architecture: str, config: Config) -> DecoderSpec:
    common = _common("olmo2", architecture, {"rms_norm_eps": 1e-5, **config})
    biases = _biases({**config, "mlp_bias": False})
    return DecoderSpec(**common, **biases, layout="olmo2", has_qk_norm=True, is_qk_norm_wide=True)


def _phi3(architecture: str, config: Config) -> DecoderSpec:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    # This family's configs of the first hour say "su" or "yarn" and mean longrope.
    is_long = kind in ("longrope", "su", "yarn")
    plain = {**config, "rope_parameters": None, "rope_scaling": None if is_long else rope, "rope_theta": theta}
    common = _common("phi3", architecture, {"rms_norm_eps": 1e-5, **plain})
    part = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(common["head_dim"] * part)
    if is_long:
        common |= _longrope(config, rope, common["max_context_tokens"], rotary_dim)
    sliding = _sliding({**config, "max_window_layers": 0}, common["num_layers"])
    return DecoderSpec(**common, **sliding, layout="phi3", rotary_dim=rotary_dim)


def _longrope(config: Config, rope: Config, max_positions: int, rotary_dim: int) -> dict[str, Any]:
    """Rope within the original context, where the short divisors hold; beyond it every earlier key would turn anew.

    Source: transformers `modeling_rope_utils`, `_compute_longrope_parameters`.
    """
    given = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    original = int(given or max_positions)
    divisors = tuple(float(divisor) for divisor in rope["short_factor"])
    if len(divisors) != rotary_dim // 2:
        raise UnsupportedCheckpoint(f"short_factor has {len(divisors)} numbers, rope has {rotary_dim // 2} frequencies")
    factor = float(rope.get("factor") or max_positions / original)
    scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    values = (("attention_factor", float(rope.get("attention_factor") or scale)),)
    scaling = RopeScaling("longrope", values, divisors)
    return {"rope_scaling": scaling, "max_context_tokens": min(original, max_positions)}


def _gemma(architecture: str, config: Config) -> DecoderSpec:
    _refuse(config, architecture, "use_bidirectional_attention")
    return DecoderSpec(**_gemma_common("gemma", architecture, config))


def _gemma_common(family: str, architecture: str, config: Config) -> dict[str, Any]:
    activation = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
    # The first Gemma's config says "gelu" and means its tanh approximation, as transformers knows.
    activation = "gelu_pytorch_tanh" if family == "gemma" and activation == "gelu" else activation
    common = _common(
        family, architecture, {"tie_word_embeddings": True, "head_dim": 256, **config, "hidden_act": activation}
    )
    return {
        **common, **_biases({**config, "mlp_bias": False}), "norm_offset": 1.0,
        "embedding_scale": math.sqrt(common["model_dim"]), "is_embedding_scale_rounded": True,
    }  # fmt: skip


def _gemma2(architecture: str, config: Config) -> DecoderSpec:
    _refuse(config, architecture, "use_bidirectional_attention")
    num_layers = int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or _alternating(num_layers, 2)
    softcaps: dict[str, Any] = {
        "attention_softcap": _positive(config.get("attn_logit_softcapping")),
        "logits_softcap": _positive(config.get("final_logit_softcapping")),
    }
    return DecoderSpec(
        **_gemma_common("gemma2", architecture, config), **softcaps, layout="gemma2",
        **_sliding({**config, "layer_types": kinds}, num_layers), attention_scale=_query_scale(config),
    )  # fmt: skip


def _gemma3(architecture: str, config: Config) -> DecoderSpec:
    _refuse(config, architecture, "use_bidirectional_attention", "attn_logit_softcapping")
    num_layers, rope = int(config["num_hidden_layers"]), config.get("rope_parameters") or {}
    kinds = config.get("layer_types") or _alternating(num_layers, int(config.get("sliding_window_pattern") or 6))
    full = rope.get("full_attention") or config.get("rope_scaling") or {}
    local = rope.get("sliding_attention") or {}
    if _rope_scaling(local) is not None:
        raise UnsupportedCheckpoint(f"{architecture} with rope scaling on sliding layers is not supported")
    theta = full.get("rope_theta") or config.get("rope_theta") or 1_000_000.0
    plain = {**config, "rope_parameters": None, "rope_scaling": full, "rope_theta": theta}
    return DecoderSpec(
        **_gemma_common("gemma3", architecture, plain), layout="gemma2", has_qk_norm=True,
        **_sliding({**config, "layer_types": kinds}, num_layers), attention_scale=_query_scale(config),
        sliding_rope_theta=float(local.get("rope_theta") or config.get("rope_local_base_freq") or 10_000.0),
        logits_softcap=_positive(config.get("final_logit_softcapping")),
    )  # fmt: skip


def _alternating(num_layers: int, pattern: int) -> list[str]:
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]


def _query_scale(config: Config) -> float:
    return 1.0 / math.sqrt(float(config.get("query_pre_attn_scalar") or 256))


def _positive(value: Any) -> float | None:
    return float(value) if value else None


def _gpt2(architecture: str, config: Config) -> DecoderSpec:
    _refuse(config, architecture, "add_cross_attention", "scale_attn_by_inverse_layer_idx")
    dim = int(config["n_embd"])
    plain = {
        "tie_word_embeddings": True, **config, "hidden_size": dim, "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"], "num_key_value_heads": None, "head_dim": None,
        "intermediate_size": config.get("n_inner") or 4 * dim, "max_position_embeddings": config["n_positions"],
        "hidden_act": config.get("activation_function", "gelu_new"),
        "rms_norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }  # fmt: skip
    scale = None if config.get("scale_attn_weights", True) else 1.0
    return DecoderSpec(**_learned("gpt2", architecture, plain, 0), is_transposed=True, attention_scale=scale)


def _opt(architecture: str, config: Config) -> DecoderSpec:
    _refuse(config, architecture, "_remove_final_layer_norm")
    width, is_pre = config.get("word_embed_proj_dim"), config.get("do_layer_norm_before", True)
    if width not in (None, config["hidden_size"]) or not is_pre:
        raise UnsupportedCheckpoint(f"{architecture} with projected embeddings or norms behind (350m) is not supported")
    if not config.get("layer_norm_elementwise_affine", True):
        raise UnsupportedCheckpoint(f"{architecture} with norms without weights is not supported")
    plain = {
        "tie_word_embeddings": True, **config, "intermediate_size": config["ffn_dim"], "rms_norm_eps": 1e-5,
        "hidden_act": config.get("activation_function", "relu"), "num_key_value_heads": None, "head_dim": None,
    }  # fmt: skip
    return DecoderSpec(**_learned("opt", architecture, plain, 2, has_bias=bool(config.get("enable_bias", True))))


def _learned(family: str, architecture: str, config: Config, offset: int, has_bias: bool = True) -> dict[str, Any]:
    """Decoders of the years before rope: learned positions, layer norms, plain feed-forward halves."""
    common = _common(family, architecture, config)
    return {
        **common, "layout": family, "is_gated": False, "is_layer_norm": True, "has_qkv_bias": has_bias,
        "has_o_bias": has_bias, "has_mlp_bias": has_bias, "no_rope_layers": tuple(range(common["num_layers"])),
        "learned_positions": common["max_context_tokens"] + offset, "position_offset": offset,
    }  # fmt: skip


def _generic(architecture: str, config: Config) -> DecoderSpec:
    """Only what the KV cache and the scheduler need to know; `transformers` knows the rest."""
    _refuse(config, architecture, "is_encoder_decoder", "use_bidirectional_attention")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [entry.get("rope_type") or entry.get("type") for entry in (rope, *rope.values()) if isinstance(entry, dict)]
    if "longrope" in kinds:
        # transformers turns every key anew when the longest sequence of a batch outgrows the original context.
        raise UnsupportedCheckpoint(f"{architecture} with rope scaling 'longrope' is not supported")
    plain = {
        "intermediate_size": 0, **config, "hidden_act": "silu", "rope_parameters": None, "rope_scaling": None,
    }  # fmt: skip
    whole = json.dumps(dict(config), sort_keys=True)
    return DecoderSpec(**_common("generic", architecture, plain), layout="generic", generic_config=whole)


FAMILIES: dict[str, Callable[[str, Config], DecoderSpec]] = {
    "GPT2LMHeadModel": _gpt2,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "GemmaForCausalLM": _gemma,
    "GraniteForCausalLM": _granite,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "OPTForCausalLM": _opt,
    "Olmo2ForCausalLM": _olmo2,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
}
"""transformers architecture name → how to read its config."""

GENERIC = (
    "ArceeForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM", "Ernie4_5ForCausalLM", "Exaone4ForCausalLM",
    "GPTNeoXForCausalLM", "Glm4ForCausalLM", "GlmForCausalLM", "NemotronForCausalLM", "Olmo3ForCausalLM",
    "OlmoForCausalLM", "PersimmonForCausalLM", "PhiForCausalLM", "SeedOssForCausalLM", "StableLmForCausalLM",
    "Starcoder2ForCausalLM", "VaultGemmaForCausalLM",
)  # fmt: skip
"""Architectures that run through transformers' modules: each is tested, none is described."""

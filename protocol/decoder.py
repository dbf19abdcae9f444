"""One decoder-only transformer described by data: what the importer checks, the loader fuses and the engine runs.

Pure. Built from a Hugging Face `config.json`; every family is a row of `FAMILIES`, none is a class of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nearline.protocol.errors import UnsupportedCheckpoint

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched: `kind` is transformers' rope_type, `values` its other fields."""

    kind: str
    values: tuple[tuple[str, float], ...] = ()

    def value(self, name: str, default: float) -> float:
        return dict(self.values).get(name, default)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shapes and switches of a decoder. Shape letters as in DESIGN.md: L layers, M model dim, H heads, K kv heads,
    D head dim, F ffn dim, V vocab. `no_rope_layers` and `sliding_layers` list layer indices."""

    family: str
    architecture: str
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_context_tokens: int
    dtype: str
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    activation: str = "silu"
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    no_rope_layers: tuple[int, ...] = ()

    @property
    def kv_values_per_token(self) -> int:
        """Numbers (not bytes) that one position keeps in the KV cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor the checkpoint must hold. Slots of one `group` are adjacent and equal in all but dim 0."""

    name: str
    shape: tuple[int, ...]
    group: str = ""


def decoder_spec(config: Config) -> DecoderSpec:
    """Describe the model of a `config.json`.

    Raises UnsupportedCheckpoint for an unknown architecture, a missing field or a feature we do not run.
    """
    architecture = (config.get("architectures") or ["(none)"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedCheckpoint(f"architecture {architecture!r} is not supported; supported: {known}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedCheckpoint(f"pre-quantised weights ({method}) are not supported; use the original model")
    try:
        return family(architecture, config)
    except KeyError as missing:
        raise UnsupportedCheckpoint(f"config.json lacks {missing} (architecture {architecture})") from None


def tensor_slots(spec: DecoderSpec) -> list[TensorSlot]:
    """List the tensors of the decoder in execution order: the order of bytes in our checkpoints."""
    slots = [TensorSlot("model.embed_tokens.weight", (spec.vocab_size, spec.model_dim))]
    for index in range(spec.num_layers):
        slots += _layer_slots(spec, f"model.layers.{index}.")
    slots.append(TensorSlot("model.norm.weight", (spec.model_dim,)))
    if not spec.is_tied:
        slots.append(TensorSlot("lm_head.weight", (spec.vocab_size, spec.model_dim)))
    return slots


def _layer_slots(spec: DecoderSpec, prefix: str) -> list[TensorSlot]:
    M, F, D = spec.model_dim, spec.ffn_dim, spec.head_dim
    q_dim, kv_dim = spec.num_heads * D, spec.num_kv_heads * D
    attn, mlp = prefix + "self_attn.", prefix + "mlp."
    slots = [TensorSlot(prefix + "input_layernorm.weight", (M,))]
    qkv = (("q", q_dim), ("k", kv_dim), ("v", kv_dim))
    slots += [TensorSlot(f"{attn}{x}_proj.weight", (dim, M), attn + "qkv.weight") for x, dim in qkv]
    if spec.has_qkv_bias:
        slots += [TensorSlot(f"{attn}{x}_proj.bias", (dim,), attn + "qkv.bias") for x, dim in qkv]
    if spec.has_qk_norm:
        slots += [TensorSlot(f"{attn}{x}_norm.weight", (D,)) for x in ("q", "k")]
    slots.append(TensorSlot(attn + "o_proj.weight", (M, q_dim)))
    if spec.has_o_bias:
        slots.append(TensorSlot(attn + "o_proj.bias", (M,)))
    slots.append(TensorSlot(prefix + "post_attention_layernorm.weight", (M,)))
    slots += [TensorSlot(f"{mlp}{x}_proj.weight", (F, M), mlp + "gate_up.weight") for x in ("gate", "up")]
    if spec.has_mlp_bias:
        slots += [TensorSlot(f"{mlp}{x}_proj.bias", (F,), mlp + "gate_up.bias") for x in ("gate", "up")]
    slots.append(TensorSlot(mlp + "down_proj.weight", (M, F)))
    if spec.has_mlp_bias:
        slots.append(TensorSlot(mlp + "down_proj.bias", (M,)))
    return slots


def _common(family: str, architecture: str, config: Config) -> dict[str, Any]:
    heads, dim = int(config["num_attention_heads"]), int(config["hidden_size"])
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "gelu_pytorch_tanh", "relu"):
        raise UnsupportedCheckpoint(f"activation {activation!r} is not supported")
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


_ROPE_KINDS = ("llama3", "linear", "dynamic", "yarn")


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


FAMILIES: dict[str, Callable[[str, Config], DecoderSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
}
"""transformers architecture name → how to read its config."""

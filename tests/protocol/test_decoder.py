"""DecoderSpec against transformers: same tensors, same shapes, same switches."""

from typing import Any

import pytest
import torch
import transformers

from nearline.protocol import FAMILIES, decoder_spec, tensor_slots
from nearline.protocol.errors import UnsupportedCheckpoint

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


def model_of(architecture: str, **overrides: Any) -> Any:
    cls = getattr(transformers, architecture)
    with torch.device("meta"):
        return cls(cls.config_class(**(SMALL | overrides), architectures=[architecture]))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_the_tensor_list_is_transformers_own(architecture: str, is_tied: bool) -> None:
    model = model_of(architecture, tie_word_embeddings=is_tied)
    spec = decoder_spec(model.config.to_dict())
    ours = {slot.name: slot.shape for slot in tensor_slots(spec)}
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=True)}
    assert ours == theirs
    assert spec.is_tied is is_tied


@pytest.mark.parametrize(
    ("architecture", "switch"), [("LlamaForCausalLM", "attention_bias"), ("LlamaForCausalLM", "mlp_bias")]
)
def test_biases_follow_the_config(architecture: str, switch: str) -> None:
    model = model_of(architecture, **{switch: True})
    ours = {slot.name for slot in tensor_slots(decoder_spec(model.config.to_dict()))}
    assert ours == {name for name, _ in model.named_parameters()}


def test_layers_without_rope_are_smollm3s_every_fourth() -> None:
    spec = decoder_spec(model_of("SmolLM3ForCausalLM").config.to_dict())
    assert spec.no_rope_layers == (3,)


def test_smollm3_is_tied_unless_its_config_says_otherwise() -> None:
    config = model_of("SmolLM3ForCausalLM").config.to_dict()
    assert not decoder_spec({**config, "tie_word_embeddings": False}).is_tied
    del config["tie_word_embeddings"]
    assert decoder_spec(config).is_tied


def test_sliding_layers_follow_layer_types() -> None:
    config = model_of("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=16, max_window_layers=2).config
    spec = decoder_spec(config.to_dict())
    assert (spec.sliding_window, spec.sliding_layers) == (16, (2, 3))
    mistral = decoder_spec(model_of("MistralForCausalLM", sliding_window=8).config.to_dict())
    assert (mistral.sliding_window, mistral.sliding_layers) == (8, (0, 1, 2, 3))
    assert decoder_spec(model_of("MistralForCausalLM", sliding_window=None).config.to_dict()).sliding_window is None


def test_both_generations_of_config_keys_are_read() -> None:
    old = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 128, "torch_dtype": "bfloat16",
        "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    }  # fmt: skip
    spec = decoder_spec(old)
    assert (spec.dtype, spec.rope_theta, spec.num_kv_heads, spec.head_dim) == ("bfloat16", 500000.0, 4, 8)
    assert spec.rope_scaling is not None
    assert spec.rope_scaling.value("factor", 1.0) == 8.0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*supported: Arcee.*GPT2.*LlamaForCausalLM"),
        ({"architectures": None}, "none"),
        ({"hidden_size": None}, "hidden_size|int"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_act": "swish2"}, "swish2"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_what_we_cannot_run_is_refused_by_name(change: dict[str, Any], complaint: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **SMALL, **change}
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(UnsupportedCheckpoint, match=complaint):
        decoder_spec(config)


LOCAL_SCALING = {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}
SHORT = {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 8}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("MixtralForCausalLM", {"num_local_experts": 8}, r"Mixtral.*\(a mixture of experts\).*supported: .*MistralFor"),
    ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 16}, "projected embeddings"),
    ("OPTForCausalLM", {"ffn_dim": 48, "do_layer_norm_before": False}, "norms behind"),
    ("OPTForCausalLM", {"ffn_dim": 48, "layer_norm_elementwise_affine": False}, "norms without weights"),
    ("OPTForCausalLM", {}, "lacks 'ffn_dim'"),
    ("GPT2LMHeadModel", {**GPT2, "add_cross_attention": True}, "add_cross"),
    ("Phi3ForCausalLM", {"rope_scaling": SHORT}, "short_factor has 1"),
    ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope"}}, "lacks 'short_factor'"),
    ("PhiForCausalLM", {"rope_scaling": {"type": "longrope"}}, "longrope"),
    ("Gemma3ForCausalLM", {"rope_parameters": LOCAL_SCALING}, "sliding layers"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "change", "complaint"), REFUSED)
def test_what_a_family_lacks_is_refused_by_name(architecture: str, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=complaint):
        decoder_spec({"architectures": [architecture], **SMALL, **change})


def test_gemma3_configs_of_both_generations_mean_the_same() -> None:
    """As on the hub in 2025 (flat fields, a pattern) and as transformers 5 writes them (nested, a list)."""
    old = {
        "architectures": ["Gemma3ForCausalLM"], **SMALL, "num_hidden_layers": 7, "head_dim": 8, "sliding_window": 16,
        "sliding_window_pattern": 6, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "rope_scaling": None,
        "query_pre_attn_scalar": 8, "hidden_activation": "gelu_pytorch_tanh", "torch_dtype": "float32",
    }  # fmt: skip
    new = transformers.Gemma3TextConfig(**{k: v for k, v in old.items() if k != "architectures"}).to_dict()
    assert "rope_theta" not in new
    spec = decoder_spec(old)
    assert spec == decoder_spec(new | {"architectures": old["architectures"]})
    assert spec.sliding_layers == (0, 1, 2, 3, 4, 6)
    assert (spec.rope_theta, spec.sliding_rope_theta, spec.is_tied) == (1e6, 1e4, True)


def test_phi4_is_a_phi3_and_phi3_says_su_for_longrope() -> None:
    phi4 = {"architectures": ["Phi3ForCausalLM"], **SMALL, "rope_theta": 250_000.0, "rope_scaling": None}
    assert (decoder_spec(phi4).rope_theta, decoder_spec(phi4).rope_scaling) == (250_000.0, None)
    factors = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [4.0] * 3}
    mini = {
        **phi4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64, "max_position_embeddings": 1024,
        "rope_scaling": {"type": "su", **factors},
    }  # fmt: skip
    spec = decoder_spec(mini)
    assert (spec.max_context_tokens, spec.rotary_dim) == (64, 6)
    assert spec.rope_scaling is not None
    assert spec.rope_scaling.divisors == (1.0, 1.5, 2.0)


def test_the_first_gemmas_gelu_is_the_tanh_approximation() -> None:
    config = {"architectures": ["GemmaForCausalLM"], **SMALL, "hidden_act": "gelu", "hidden_activation": None}
    assert decoder_spec(config).activation == "gelu_pytorch_tanh"

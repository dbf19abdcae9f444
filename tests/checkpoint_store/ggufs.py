"""Writes small GGUF files the way llama.cpp's converter does, from the weights of a transformers model."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def interleave(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """The row order llama.cpp wants: Source: `permute` of its convert_hf_to_gguf.py."""
    grouped = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return grouped.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensor_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{suffix}"


def write_gguf(
    path: Path,
    model: Any,
    arch: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    **extra: Any,
) -> Path:
    """Write `model` with matrices of type `kind` (norms F32) and a byte-level vocabulary; `extra` adds metadata."""
    config = model.config
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    add_vocabulary(writer, config.vocab_size)
    for key, value in extra.items():
        add_value(writer, key.replace("__", "."), value)
    for name, parameter in model.named_parameters():
        values = parameter.detach().to(torch.float32).numpy()
        if arch in ("llama", "granite") and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = interleave(values, heads)
        used = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_tensor_name(name), quantize(values, used), raw_dtype=used)
    finish(writer)
    return path


def add_vocabulary(writer: GGUFWriter, size: int) -> None:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*letters, *specials, "<tool>", "he", *[f"[PAD{i}]" for i in range(size - 261)]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 3 + [4, 1] + [5] * (size - 261))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(False)


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

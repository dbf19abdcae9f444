"""The same weights in every engine's own format, made once per run in a scratch directory."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.cold_start import make_rival_directory
from nearline.checkpoint_store.convert import import_checkpoint
from nearline.protocol import CheckpointKind, Digest

PAIRED = ("q_proj", "k_proj")
"""Projections whose rows GGUF keeps in pairs of neighbours, for its other rotary layout."""


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """Where each engine finds the model: we by weight format (a store's root, the digest), the others by path."""

    ours: dict[str, tuple[Path, Digest]]
    hf: Path
    ggufs: dict[str, Path]


def make_files(gguf: Path, work: Path, formats: tuple[str, ...], with_rivals: bool) -> EngineFiles:
    """Import for us in every weight format; convert for the rivals from the dequantised weights."""
    if not formats and not with_rivals:
        return EngineFiles({"bf16": _imported(work, str(gguf))}, work, {})
    hf = work / "hf"
    make_rival_directory(gguf, hf)
    sources = {"bf16": str(hf)} | {name: f"{name}:{hf}" for name in formats}
    ours = {name: _imported(work / f"store-{name}", source) for name, source in sources.items()}
    ggufs = {}
    if with_rivals:
        ggufs = {"Q4_1": gguf} | {kind: write_gguf(hf, work / f"{kind}.gguf", kind) for kind in ("BF16", "F16", "Q8_0")}
    return EngineFiles(ours, hf, ggufs)


def _imported(root: Path, source: str) -> tuple[Path, Digest]:
    """Import into a store of its own, because a store has one owner at a time."""
    return root, import_checkpoint(root, CheckpointKind.MODEL, source).digest


def write_gguf(hf: Path, path: Path, kind: str) -> Path:
    """Write a Llama of a Hugging Face directory as GGUF, matrices as `kind`, vectors in float32.

    Source: the names and metadata of llama.cpp's own converter. The vocabulary is left out: tokens go in as ids.
    """
    import gguf

    config = json.loads((hf / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, tensor in load_file(hf / "model.safetensors").items():
        num_heads = heads if "q_proj" in name else kv_heads
        _add_tensor(writer, _gguf_name(name), tensor, kind, num_heads if name.split(".")[-2] in PAIRED else 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer: Any, name: str, tensor: torch.Tensor, kind: str, num_turned_heads: int) -> None:
    import gguf

    values = tensor.float()
    if num_turned_heads:
        rows, columns = values.shape
        half = rows // num_turned_heads // 2
        values = values.reshape(num_turned_heads, 2, half, columns).swapaxes(1, 2).reshape(rows, columns)
    if values.dim() == 1:
        writer.add_tensor(name, values.numpy())
        return
    of_kind = gguf.GGMLQuantizationType[kind]
    data = gguf.quants.quantize(values.contiguous().numpy(), of_kind)
    writer.add_tensor(name, data, raw_dtype=of_kind)


def _gguf_name(name: str) -> str:
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q",
        "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
        "up_proj": "ffn_up", "down_proj": "ffn_down",
    }  # fmt: skip
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name]
    if name == "lm_head.weight":
        return "output.weight"
    words = name.split(".")
    return f"blk.{words[2]}.{parts[words[-2]]}.weight"

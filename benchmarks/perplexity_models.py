"""The models that benchmarks/perplexity.py compares: one function in several weight formats, as our checkpoints."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.checkpoint_store.quantize_codes import decode, encode
from nearline.protocol import QUANT_FORMATS, CheckpointKind

State = dict[str, Tensor]
EMBEDDING = "model.embed_tokens.weight"


def make_models(hf: Path, work: Path) -> dict[str, Path]:
    """Import a Llama of a Hugging Face directory in every format; returns label → committed directory.

    The model to start from was 4-bit GGUF once, in blocks of 32 columns: formats with groups at the same places would
    find its old grid and look lossless. `shuffled` is the same function with columns in another order.
    """
    config, state = json.loads((hf / "config.json").read_text()), load_file(hf / "model.safetensors")
    state = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    mixed = shuffled(state, config)
    made = {"bf16": _write(hf, work / "mixed", mixed)}
    for name in ("Q8_0", "Q4_1"):
        made[f"llama.cpp {name} (weights alone)"] = _write(hf, work / name, _as_gguf(mixed, name))
    made["int4, down in 4 bits too"] = _write(hf, work / "all4", _in_four_bits(mixed))
    made["bf16, as given"] = _write(hf, work / "given", state)
    directories = {label: _import(work, str(source)) for label, source in made.items()}
    for name in ("int8", "int4"):
        directories[name] = _import(work, f"{name}:{made['bf16']}")
        directories[f"{name}, as given"] = _import(work, f"{name}:{made['bf16, as given']}")
    return directories


def shuffled(state: State, config: dict[str, int]) -> State:
    """Put hidden, feed-forward and value dims in random order: what the model computes does not change."""
    torch.manual_seed(0)
    order, mixed = torch.randperm(config["hidden_size"]), dict(state)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config["hidden_size"] // heads
    for name, tensor in state.items():
        if name == EMBEDDING or name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            mixed[name] = tensor[:, order]
        elif name.endswith("norm.weight"):
            mixed[name] = tensor[order]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        inner = torch.randperm(config["intermediate_size"])
        for part in ("gate", "up"):
            mixed[f"{prefix}mlp.{part}_proj.weight"] = state[f"{prefix}mlp.{part}_proj.weight"][inner][:, order]
        mixed[f"{prefix}mlp.down_proj.weight"] = state[f"{prefix}mlp.down_proj.weight"][order][:, inner]
        values = torch.stack([torch.randperm(head_dim) + head_dim * head for head in range(kv_heads)])
        v_name, o_name = f"{prefix}self_attn.v_proj.weight", f"{prefix}self_attn.o_proj.weight"
        mixed[v_name] = mixed[v_name][values.flatten()]
        within = (values - head_dim * torch.arange(kv_heads)[:, None]).repeat_interleave(heads // kv_heads, dim=0)
        columns = within + head_dim * torch.arange(heads)[:, None]
        mixed[o_name] = state[o_name][order][:, columns.flatten()]
    return mixed


def _as_gguf(state: State, name: str) -> State:
    """What llama.cpp's file format makes of the same weights: projections in `name`, the embedding in Q8_0."""
    import gguf

    def rounded(tensor: Tensor, kind: str) -> Tensor:
        of_kind = gguf.GGMLQuantizationType[kind]
        codes = gguf.quants.quantize(tensor.float().numpy(), of_kind)
        return torch.from_numpy(gguf.quants.dequantize(codes, of_kind).copy()).to(torch.float32)

    return {
        tensor: rounded(value, "Q8_0" if tensor == EMBEDDING else name) if value.dim() == 2 else value
        for tensor, value in state.items()
    }


def _in_four_bits(state: State) -> State:
    """What our int4 would make of the weights if it spared the down projections no more than the others."""

    def rounded(name: str, tensor: Tensor) -> Tensor:
        wanted, values = QUANT_FORMATS["int8" if name == EMBEDDING else "int4"], tensor.float().numpy()
        coded = encode(values, wanted)
        decoded = decode((coded.codes, coded.scales, coded.offsets), wanted, values.shape)
        return torch.from_numpy(decoded.copy())

    return {name: rounded(name, tensor) if tensor.dim() == 2 else tensor for name, tensor in state.items()}


def _write(hf: Path, directory: Path, state: State) -> Path:
    directory.mkdir()
    for file in hf.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copyfile(file, directory / file.name)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
    return directory


def _import(work: Path, source: str) -> Path:
    manifest = import_checkpoint(work / "store", CheckpointKind.MODEL, source)
    return work / "store" / "checkpoints" / manifest.digest

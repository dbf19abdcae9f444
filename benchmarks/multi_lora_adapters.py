"""Random PEFT adapters, imported the way users' are."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.protocol import CheckpointKind, DecoderSpec, Digest

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    root: Path, base: Digest, spec: DecoderSpec, seed: int, rank: int = 16, modules: Sequence[str] = ALL
) -> Digest:
    """Write one as peft would and import it; the source goes again."""
    source = root / "source"
    source.mkdir(exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    q, kv, M, F = spec.query_dim, spec.kv_dim, spec.model_dim, spec.ffn_dim
    shapes = {
        "q_proj": (q, M), "k_proj": (kv, M), "v_proj": (kv, M), "o_proj": (M, q),
        "gate_proj": (F, M), "up_proj": (F, M), "down_proj": (M, F),
    }  # fmt: skip
    tensors = {}
    for layer in range(spec.num_layers):
        for name in modules:
            block = "self_attn" if name[0] in "qkvo" else "mlp"
            rows, columns = shapes[name]
            at = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{at}.lora_A.weight"] = (torch.randn(rank, columns, generator=draw) * 0.01).bfloat16()
            tensors[f"{at}.lora_B.weight"] = (torch.randn(rows, rank, generator=draw) * 0.01).bfloat16()
    save_file(tensors, str(source / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules)}
    (source / "adapter_config.json").write_text(json.dumps(config))
    return import_checkpoint(root, CheckpointKind.ADAPTER, str(source), base).digest

"""What the tensors of a decoder are called, which shapes they have, and in which order they run.

Pure. Names are transformers' own; a family with other names is another row of `LAYOUTS`.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nearline.protocol.decoder import DecoderSpec


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor the checkpoint must hold.

    `role` says what it is for whatever its name ("qkv.weight", "embedding"); `layer` is None outside the layers.
    Slots of one role and layer are adjacent and equal in all but dim 0.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of tensors by role, without `.weight`; those of a layer begin with `layers`, its index and a dot.

    `roles` is in execution order. A norm that is not there is not applied. `takes_adapters`: the projections are the
    seven of Llama, each a tensor of its own, which LoRA adapters may change.
    """

    embedding: str
    layers: str
    final_norm: str
    roles: Mapping[str, tuple[str, ...]]
    positions: str = ""
    takes_adapters: bool = False


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION = {"qkv": _QKV, "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",), "o": ("self_attn.o_proj",)}
_MLP = {"gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}
_PRE = {"input_norm": ("input_layernorm",)}
_BEHIND_ATTENTION = {"attention_post_norm": ("post_attention_layernorm",)}
_BEHIND_MLP = {"mlp_post_norm": ("post_feedforward_layernorm",)}
_LLAMA = {**_PRE, **_ATTENTION, "mlp_norm": ("post_attention_layernorm",), **_MLP}
_GEMMA2 = {
    **_PRE, **_ATTENTION, **_BEHIND_ATTENTION, "mlp_norm": ("pre_feedforward_layernorm",), **_MLP, **_BEHIND_MLP,
}  # fmt: skip
_PHI3 = {**_LLAMA, "qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}
_GPT2 = {
    "input_norm": ("ln_1",), "qkv": ("attn.c_attn",), "o": ("attn.c_proj",),
    "mlp_norm": ("ln_2",), "gate_up": ("mlp.c_fc",), "down": ("mlp.c_proj",),
}  # fmt: skip
_OPT = {
    "input_norm": ("self_attn_layer_norm",), "qkv": _QKV, "o": ("self_attn.out_proj",),
    "mlp_norm": ("final_layer_norm",), "gate_up": ("fc1",), "down": ("fc2",),
}  # fmt: skip


def _modern(roles: Mapping[str, tuple[str, ...]], takes_adapters: bool = True) -> Layout:
    return Layout("model.embed_tokens", "model.layers.", "model.norm", roles, takes_adapters=takes_adapters)


LAYOUTS = {
    "generic": Layout("", "", "", {}),
    "llama": _modern(_LLAMA),
    "olmo2": _modern({**_ATTENTION, **_BEHIND_ATTENTION, **_MLP, **_BEHIND_MLP}),
    "gemma2": _modern(_GEMMA2),
    "phi3": _modern(_PHI3, takes_adapters=False),
    "gpt2": Layout("transformer.wte", "transformer.h.", "transformer.ln_f", _GPT2, "transformer.wpe"),
    "opt": Layout(
        "model.decoder.embed_tokens", "model.decoder.layers.", "model.decoder.final_layer_norm", _OPT,
        "model.decoder.embed_positions",
    ),
}  # fmt: skip


@functools.lru_cache(maxsize=16)
def tensor_slots(spec: DecoderSpec) -> tuple[TensorSlot, ...]:
    """List the tensors of the decoder in execution order: the order of bytes in our checkpoints.

    None for layout "generic", whose names only transformers knows.
    """
    if spec.layout == "generic":
        return ()
    layout, table = LAYOUTS[spec.layout], (spec.vocab_size, spec.model_dim)
    slots = [TensorSlot(layout.embedding + ".weight", table, "embedding")]
    if spec.learned_positions:
        slots.append(TensorSlot(layout.positions + ".weight", (spec.learned_positions, spec.model_dim), "positions"))
    for index in range(spec.num_layers):
        for role in layout.roles:
            slots += _layer_slots(spec, layout, index, role)
    kinds = ("weight", "bias") if spec.is_layer_norm else ("weight",)
    slots += [TensorSlot(f"{layout.final_norm}.{kind}", (spec.model_dim,), f"final_norm.{kind}") for kind in kinds]
    if not spec.is_tied:
        slots.append(TensorSlot("lm_head.weight", table, "head"))
    return tuple(slots)


def _layer_slots(spec: DecoderSpec, layout: Layout, index: int, role: str) -> Iterator[TensorSlot]:
    names = [f"{layout.layers}{index}.{name}" for name in layout.roles[role]]
    if role.endswith("_norm"):
        size = {"q_norm": _norm_dim(spec, spec.num_heads), "k_norm": _norm_dim(spec, spec.num_kv_heads)}
        rows, columns, has_bias = [size.get(role, spec.model_dim)], None, spec.is_layer_norm
        if role in size and not spec.has_qk_norm:
            return
    else:
        rows, columns, has_bias = _projection(spec, role, len(names))
    for name, num_rows in zip(names, rows, strict=True):
        shape = (num_rows,) if columns is None else (num_rows, columns)
        yield TensorSlot(name + ".weight", shape[::-1] if spec.is_transposed else shape, role + ".weight", index)
    if has_bias:
        for name, num_rows in zip(names, rows, strict=True):
            yield TensorSlot(name + ".bias", (num_rows,), role + ".bias", index)


def _norm_dim(spec: DecoderSpec, num_heads: int) -> int:
    return num_heads * spec.head_dim if spec.is_qk_norm_wide else spec.head_dim


def _projection(spec: DecoderSpec, role: str, num_names: int) -> tuple[list[int], int, bool]:
    """Rows of each tensor of a projection, their columns, and whether it has a bias."""
    M, F = spec.model_dim, spec.ffn_dim
    if role == "o":
        return [M], spec.query_dim, spec.has_o_bias
    if role == "down":
        return [M], F, spec.has_mlp_bias
    parts = [spec.query_dim, spec.kv_dim, spec.kv_dim] if role == "qkv" else [F, F] if spec.is_gated else [F]
    rows = parts if num_names == len(parts) else [sum(parts)]
    return rows, M, spec.has_qkv_bias if role == "qkv" else spec.has_mlp_bias

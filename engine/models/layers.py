"""Weights of a decoder, one value per layer: which tensors a layer holds and how they become views ready to use."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nearline.kernels import LayerTensors
from nearline.protocol import DecoderSpec, tensor_slots
from nearline.protocol.errors import CheckpointCorrupt

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Weights(Protocol):
    """Where tensors come from; `loader.LoadedCheckpoint` is one. A tensor may be read only after `wait_for` it."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor. Raises CheckpointCorrupt if there is none of that name."""
        ...

    def fused(self, names: Sequence[str]) -> Tensor:
        """Return tensors, stacked along dim 0, as one: a view where they are adjacent."""
        ...

    def wait_for(self, names: Sequence[str]) -> None: ...


class WeightReader:
    """Turns a checkpoint's tensors into weights of one dtype, each layer as soon as its bytes are there.

    A view stays a view when the stored dtype is the compute dtype; otherwise the tensor is converted once, which
    costs a private copy.
    """

    def __init__(self, spec: DecoderSpec, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._weights, self._dtype, self._device = spec, weights, dtype, device
        self._names: dict[str, list[str]] = {}
        for slot in tensor_slots(spec):
            self._names.setdefault(_part_of(slot.name), []).append(slot.name)

    def layer(self, index: int) -> LayerTensors:
        """Wait for a layer's bytes and return it. Raises CheckpointCorrupt if they cannot come."""
        spec, prefix = self._spec, f"model.layers.{index}."
        self._weights.wait_for(self._names[prefix])
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
        return LayerTensors(
            input_norm_M=self._one(prefix + "input_layernorm.weight"),
            qkv_NM=self._fused(attn, qkv, "weight"),
            qkv_bias_N=self._fused(attn, qkv, "bias") if spec.has_qkv_bias else None,
            q_norm_D=self._one(attn + "q_norm.weight") if spec.has_qk_norm else None,
            k_norm_D=self._one(attn + "k_norm.weight") if spec.has_qk_norm else None,
            o_MN=self._one(attn + "o_proj.weight"),
            o_bias_M=self._one(attn + "o_proj.bias") if spec.has_o_bias else None,
            mlp_norm_M=self._one(prefix + "post_attention_layernorm.weight"),
            gate_up_NM=self._fused(mlp, gate_up, "weight"),
            gate_up_bias_N=self._fused(mlp, gate_up, "bias") if spec.has_mlp_bias else None,
            down_MF=self._one(mlp + "down_proj.weight"),
            down_bias_M=self._one(mlp + "down_proj.bias") if spec.has_mlp_bias else None,
        )

    def embedding(self) -> Tensor:
        self._weights.wait_for([EMBEDDING])
        return self._one(EMBEDDING)

    def final_norm(self) -> Tensor:
        self._weights.wait_for([FINAL_NORM])
        return self._one(FINAL_NORM)

    def head(self) -> Tensor:
        """Return the output projection [V, M]: the embedding itself when the model ties them."""
        name = EMBEDDING if self._spec.is_tied else HEAD
        self._weights.wait_for([name])
        return self._one(name)

    def _one(self, name: str) -> Tensor:
        return self._weights.tensor(name).to(device=self._device, dtype=self._dtype)

    def _fused(self, prefix: str, parts: Sequence[str], kind: str) -> Tensor:
        tensor = self._weights.fused([f"{prefix}{part}.{kind}" for part in parts])
        return tensor.to(device=self._device, dtype=self._dtype)


def check_shapes(spec: DecoderSpec, weights: Weights) -> None:
    """Refuse a checkpoint whose tensors are not the decoder's, before any byte of it is used.

    Raises CheckpointCorrupt naming the tensor and both shapes.
    """
    for slot in tensor_slots(spec):
        found = tuple(weights.tensor(slot.name).shape)
        if found != slot.shape:
            raise CheckpointCorrupt(
                f"tensor {slot.name!r} has shape {list(found)}, config.json says {list(slot.shape)}"
            )


def _part_of(name: str) -> str:
    """`model.layers.7.` for a layer's tensor, otherwise the tensor's own name."""
    pieces = name.split(".")
    return ".".join(pieces[:3]) + "." if pieces[1] == "layers" else name

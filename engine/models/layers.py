"""Weights of a decoder, one value per layer: which tensors a layer holds and how they become views ready to use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nearline.kernels import LayerTensors
from nearline.protocol import DecoderSpec, tensor_slots
from nearline.protocol.errors import CheckpointCorrupt


class Weights(Protocol):
    """Where tensors come from; `loader.LoadedCheckpoint` is one. A tensor may be read only after `wait_for` it."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor. Raises CheckpointCorrupt if there is none of that name."""
        ...

    def fused(self, names: Sequence[str]) -> Tensor:
        """Return tensors, stacked along dim 0, as one: a view where they are adjacent."""
        ...

    def wait_for(self, names: Sequence[str]) -> None: ...


class NormWeights(NamedTuple):
    """A norm over the last dim. A family's offset is already in the weight; only layer norms have a bias."""

    weight_M: Tensor
    bias_M: Tensor | None


_NO_NORM = (None, None)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; what its family lacks is None.

    Shapes: qkv [(H+2K)·D, M], o [M, H·D], gate_up [2F, M] ([F, M] without a gate), down [M, F].
    """

    input_norm: NormWeights | None
    qkv_NM: Tensor
    qkv_bias_N: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o_MN: Tensor
    o_bias_M: Tensor | None
    attention_post_norm: NormWeights | None
    mlp_norm: NormWeights | None
    gate_up_NM: Tensor
    gate_up_bias_N: Tensor | None
    down_MF: Tensor
    down_bias_M: Tensor | None
    mlp_post_norm: NormWeights | None

    def compiled(self) -> LayerTensors:
        """Give the compiled decoder its tensors."""
        input_norm, mlp_norm = self.input_norm or _NO_NORM, self.mlp_norm or _NO_NORM
        return LayerTensors(
            input_norm_M=input_norm[0],
            input_norm_bias_M=input_norm[1],
            qkv_NM=self.qkv_NM,
            qkv_bias_N=self.qkv_bias_N,
            q_norm_D=self.q_norm_D,
            k_norm_D=self.k_norm_D,
            o_MN=self.o_MN,
            o_bias_M=self.o_bias_M,
            attention_post_norm_M=None if self.attention_post_norm is None else self.attention_post_norm.weight_M,
            mlp_norm_M=mlp_norm[0],
            mlp_norm_bias_M=mlp_norm[1],
            gate_up_NM=self.gate_up_NM,
            gate_up_bias_N=self.gate_up_bias_N,
            down_MF=self.down_MF,
            down_bias_M=self.down_bias_M,
            mlp_post_norm_M=None if self.mlp_post_norm is None else self.mlp_post_norm.weight_M,
        )


class WeightReader:
    """Turns a checkpoint's tensors into weights of one dtype, each layer as soon as its bytes are there.

    A view stays a view when the stored dtype is the compute dtype; otherwise the tensor is converted once, which
    costs a private copy.
    """

    def __init__(self, spec: DecoderSpec, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._weights, self._dtype, self._device = spec, weights, dtype, device
        self._names: dict[tuple[int | None, str], list[str]] = {}
        for slot in tensor_slots(spec):
            self._names.setdefault((slot.layer, slot.role), []).append(slot.name)

    def layer(self, index: int) -> LayerWeights:
        """Wait for a layer's bytes and return it. Raises CheckpointCorrupt if they cannot come."""
        self._weights.wait_for([name for (layer, _), names in self._names.items() if layer == index for name in names])
        return LayerWeights(
            input_norm=self._norm(index, "input_norm"),
            qkv_NM=self._matrix(index, "qkv"),
            qkv_bias_N=self._found(index, "qkv.bias"),
            q_norm_D=self._norm_weight(index, "q_norm"),
            k_norm_D=self._norm_weight(index, "k_norm"),
            o_MN=self._matrix(index, "o"),
            o_bias_M=self._found(index, "o.bias"),
            attention_post_norm=self._norm(index, "attention_post_norm"),
            mlp_norm=self._norm(index, "mlp_norm"),
            gate_up_NM=self._matrix(index, "gate_up"),
            gate_up_bias_N=self._found(index, "gate_up.bias"),
            down_MF=self._matrix(index, "down"),
            down_bias_M=self._found(index, "down.bias"),
            mlp_post_norm=self._norm(index, "mlp_post_norm"),
        )

    def embedding(self) -> Tensor:
        return self._awaited("embedding")

    def positions(self) -> Tensor:
        """Return the table of learned positions, which only some families have."""
        return self._awaited("positions")

    def final_norm(self) -> NormWeights:
        self._weights.wait_for(self._names[None, "final_norm.weight"] + self._names.get((None, "final_norm.bias"), []))
        norm = self._norm(None, "final_norm")
        assert norm is not None
        return norm

    def head(self) -> Tensor:
        """Return the output projection [V, M]: the embedding itself when the model ties them."""
        return self._awaited("embedding" if self._spec.is_tied else "head")

    def _awaited(self, role: str) -> Tensor:
        self._weights.wait_for(self._names[None, role])
        return self._get(None, role)

    def _norm(self, layer: int | None, role: str) -> NormWeights | None:
        weight_M = self._norm_weight(layer, role)
        return None if weight_M is None else NormWeights(weight_M, self._found(layer, role + ".bias"))

    def _norm_weight(self, layer: int | None, role: str) -> Tensor | None:
        weight = self._found(layer, role + ".weight")
        if weight is None or not self._spec.norm_offset:
            return weight
        # In float32, as such a family is trained: in 16 bits the sum would lose the weight's lower bits.
        return weight.float() + self._spec.norm_offset

    def _matrix(self, layer: int, role: str) -> Tensor:
        matrix = self._get(layer, role + ".weight")
        return matrix.T if self._spec.is_transposed else matrix

    def _found(self, layer: int | None, role: str) -> Tensor | None:
        return self._get(layer, role) if (layer, role) in self._names else None

    def _get(self, layer: int | None, role: str) -> Tensor:
        names = self._names[layer, role]
        tensor = self._weights.tensor(names[0]) if len(names) == 1 else self._weights.fused(names)
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


def compute_dtype(spec: DecoderSpec, weights: Weights) -> torch.dtype:
    """Choose the dtype in which a checkpoint is computed: that of its projections, so that they stay views."""
    if spec.layout == "generic":
        return getattr(torch, spec.dtype)  # type: ignore[no-any-return]
    name = next(slot.name for slot in tensor_slots(spec) if slot.role == "qkv.weight")
    return weights.tensor(name).dtype

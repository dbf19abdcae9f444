"""Weights of a decoder, one value per layer: which tensors a layer holds and how they become views ready to use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nearline.kernels import LayerTensors, QuantMatrix
from nearline.protocol import DecoderSpec, QuantFormat, TensorSlot, coded_shape, format_of, tensor_slots
from nearline.protocol.errors import CheckpointCorrupt

Matrix = Tensor | QuantMatrix
"""Weights of a projection or a table, one row per output: as numbers of the compute dtype, or quantised."""


class Weights(Protocol):
    """Where tensors come from; `loader.LoadedCheckpoint` is one. A tensor may be read only after `wait_for` it."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor. Raises CheckpointCorrupt if there is none of that name."""
        ...

    def fused(self, names: Sequence[str]) -> Tensor:
        """Return tensors, stacked along dim 0, as one: a view where they are adjacent."""
        ...

    def wait_for(self, names: Sequence[str]) -> None: ...

    def is_complete(self) -> bool:
        """Whether nothing has to be waited for any more."""
        ...


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
    qkv_NM: Matrix
    qkv_bias_N: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o_MN: Matrix
    o_bias_M: Tensor | None
    attention_post_norm: NormWeights | None
    mlp_norm: NormWeights | None
    gate_up_NM: Matrix
    gate_up_bias_N: Tensor | None
    down_MF: Matrix
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


class LayerReader(Protocol):
    """Where a decoder's weights come from, each as soon as its bytes are there."""

    def is_complete(self) -> bool: ...

    def layer(self, index: int) -> LayerWeights: ...

    def embedding(self) -> Matrix: ...

    def positions(self) -> Tensor: ...

    def final_norm(self) -> NormWeights: ...

    def head(self) -> Matrix: ...


class WeightReader:
    """Turns a checkpoint's tensors into weights of one dtype, each layer as soon as its bytes are there.

    A view stays a view when the stored dtype is the compute dtype; otherwise the tensor is converted once, which
    costs a private copy. Quantised matrices are views always.
    """

    def __init__(self, spec: DecoderSpec, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._weights, self._dtype, self._device = spec, weights, dtype, device
        self._names: dict[tuple[int | None, str], list[str]] = {}
        self._formats: dict[tuple[int | None, str], QuantFormat | None] = {}
        self._shapes: dict[tuple[int | None, str], tuple[int, ...]] = {}
        for slot in tensor_slots(spec):
            place = slot.layer, slot.role
            self._names.setdefault(place, []).append(slot.name)
            self._formats[place] = quant_format(slot, spec, weights)
            rows, *columns = coded_shape(slot, spec)
            self._shapes[place] = (rows + self._shapes.get(place, (0,))[0], *columns)

    def is_complete(self) -> bool:
        """Whether every byte is there, so that no layer has to be waited for."""
        return self._weights.is_complete()

    def layer(self, index: int) -> LayerWeights:
        """Wait for a layer's bytes and return it. Raises CheckpointCorrupt if they cannot come."""
        self._weights.wait_for([n for place in self._names if place[0] == index for n in self._stored_names(place)])
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

    def embedding(self) -> Matrix:
        return self._awaited("embedding")

    def positions(self) -> Tensor:
        """Return the table of learned positions, which only some families have."""
        self._weights.wait_for(self._names[None, "positions"])
        return self._get((None, "positions"))

    def final_norm(self) -> NormWeights:
        self._weights.wait_for(self._names[None, "final_norm.weight"] + self._names.get((None, "final_norm.bias"), []))
        norm = self._norm(None, "final_norm")
        assert norm is not None
        return norm

    def head(self) -> Matrix:
        """Return the output projection [V, M]: the embedding itself when the model ties them."""
        return self._awaited("embedding" if self._spec.is_tied else "head")

    def _awaited(self, role: str) -> Matrix:
        self._weights.wait_for(self._stored_names((None, role)))
        table = self._quantised((None, role))
        return self._get((None, role)) if table is None else table

    def _norm(self, layer: int | None, role: str) -> NormWeights | None:
        weight_M = self._norm_weight(layer, role)
        return None if weight_M is None else NormWeights(weight_M, self._found(layer, role + ".bias"))

    def _norm_weight(self, layer: int | None, role: str) -> Tensor | None:
        weight = self._found(layer, role + ".weight")
        if weight is None or not self._spec.norm_offset:
            return weight
        # In float32, as such a family is trained: in 16 bits the sum would lose the weight's lower bits.
        return weight.float() + self._spec.norm_offset

    def _matrix(self, layer: int, role: str) -> Matrix:
        place = layer, role + ".weight"
        if (matrix := self._quantised(place)) is not None:
            return matrix
        plain = self._get(place)
        return plain.T if self._spec.is_transposed else plain

    def _quantised(self, place: tuple[int | None, str]) -> QuantMatrix | None:
        wanted = self._formats[place]
        if wanted is None:
            return None
        names, parts = self._stored_names(place), len(self._names[place])
        fused = [self._stack(names[first : first + parts]).to(self._device) for first in range(0, len(names), parts)]
        num_rows, num_columns = self._shapes[place]
        return QuantMatrix(fused[0], fused[1], fused[2] if wanted.has_offsets else None, (num_rows, num_columns))

    def _stored_names(self, place: tuple[int | None, str]) -> list[str]:
        names, wanted = self._names[place], self._formats[place]
        return names if wanted is None else wanted.names(names)

    def _found(self, layer: int | None, role: str) -> Tensor | None:
        return self._get((layer, role)) if (layer, role) in self._names else None

    def _get(self, place: tuple[int | None, str]) -> Tensor:
        return self._stack(self._names[place]).to(device=self._device, dtype=self._dtype)

    def _stack(self, names: Sequence[str]) -> Tensor:
        return self._weights.tensor(names[0]) if len(names) == 1 else self._weights.fused(names)


def check_shapes(spec: DecoderSpec, weights: Weights) -> None:
    """Refuse a checkpoint whose tensors are not the decoder's, before any byte of it is used.

    Raises CheckpointCorrupt naming the tensor and both shapes.
    """
    for slot in tensor_slots(spec):
        found = tuple(weights.tensor(slot.name).shape)
        wanted = quant_format(slot, spec, weights)
        if found != slot.shape and wanted is None:
            raise CheckpointCorrupt(
                f"tensor {slot.name!r} has shape {list(found)}, config.json says {list(slot.shape)}"
            )
        for name in wanted.names([slot.name])[1:] if wanted else ():
            shape = wanted.scale_shape(coded_shape(slot, spec)) if wanted else ()
            if (found := tuple(weights.tensor(name).shape)) != shape:
                raise CheckpointCorrupt(f"tensor {name!r} has shape {list(found)}, its matrix needs {list(shape)}")


def quant_format(slot: TensorSlot, spec: DecoderSpec, weights: Weights) -> QuantFormat | None:
    """Tell how a checkpoint codes a matrix, None if it holds plain numbers (or something else)."""
    tensor = weights.tensor(slot.name)
    if tensor.dtype != torch.uint8 or tensor.dim() != 2:
        return None
    return format_of(coded_shape(slot, spec), tuple(tensor.shape))


def compute_dtype(spec: DecoderSpec, weights: Weights) -> torch.dtype:
    """Choose the dtype in which a checkpoint is computed: that of its projections, so that they stay views.

    Quantised projections leave the choice to config.json, as modules of transformers do.
    """
    name = next((slot.name for slot in tensor_slots(spec) if slot.role == "qkv.weight"), None)
    if name is None or weights.tensor(name).dtype == torch.uint8:
        return getattr(torch, spec.dtype)  # type: ignore[no-any-return]
    return weights.tensor(name).dtype

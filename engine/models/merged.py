"""Private copies of a decoder's layers with one adapter's changes in each, made layer by layer.

The base's weights are never written: letting a copy go is the whole way back, bit for bit. Each weight of a copy
is rounded once, so its logits are near those of the unmerged adapter, not equal.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearline import kernels
from nearline.engine.models.adapter_weights import Adapter, LoraWeights
from nearline.engine.models.decoder import Decoder
from nearline.engine.models.layers import LayerWeights, Matrix, NormWeights, Weights, quant_format
from nearline.kernels import LoraSegment
from nearline.protocol import LAYOUTS, Bytes, DecoderSpec, Digest, tensor_slots


@dataclass(slots=True)
class _Copy:
    """The first `num_layers` layers of a twin are made."""

    reader: "_MergedReader"
    twin: Decoder
    num_layers: int = 0


class MergedDecoder:
    """Makes and keeps copies. Owns: them; the memory of one that is not kept goes to the next adapter's."""

    def __init__(self, base: Decoder) -> None:
        self._base = base
        self._copies: dict[Digest, _Copy] = {}

    @staticmethod
    def refusal(spec: DecoderSpec, weights: Weights) -> str | None:
        """Say why a base's weights cannot be merged into; None if they can."""
        if any(quant_format(slot, spec, weights) for slot in tensor_slots(spec)):
            return "the base's weights are quantised"
        return None if LAYOUTS[spec.layout].takes_adapters else f"{spec.architecture} takes no adapters"

    @staticmethod
    def num_bytes(spec: DecoderSpec, dtype: torch.dtype) -> Bytes:
        """Bytes that a copy takes."""
        M, q, kv, F = spec.model_dim, spec.query_dim, spec.kv_dim, spec.ffn_dim
        return spec.num_layers * (M * (2 * q + 2 * kv) + 3 * M * F) * dtype.itemsize

    def advance(self, adapter: Adapter, goes_on: Callable[[], bool], kept: Sequence[Digest] = ()) -> bool:
        """Copy and merge at least one layer, and more while `goes_on()`. Returns whether the copy is whole.

        `kept`: the adapters whose copies must stay; any other's memory may be taken.
        """
        copy = self._copies.get(adapter.digest) or self._begin(adapter.digest, kept)
        copy.reader.adapter = adapter
        try:
            while copy.num_layers < self._base.spec.num_layers:
                copy.twin.layer(copy.num_layers)
                copy.num_layers += 1
                if not goes_on():
                    break
        finally:
            copy.reader.adapter = None  # evicted meanwhile, it must not keep its memory
        return copy.num_layers == self._base.spec.num_layers

    def _begin(self, digest: Digest, kept: Sequence[Digest]) -> _Copy:
        given_up = next((one for one in self._copies if one not in kept), None)
        reader = _MergedReader(self._base) if given_up is None else self._copies.pop(given_up).reader
        self._copies[digest] = _Copy(reader, self._base.twin(reader))
        return self._copies[digest]

    def decoder(self, digest: Digest | None) -> Decoder:
        """The decoder of a whole copy, or the base's (None)."""
        if digest is None:
            return self._base
        copy = self._copies[digest]
        assert copy.num_layers == self._base.spec.num_layers
        return copy.twin


class _MergedReader:
    """Reads a layer of the base and changes it as the adapter says. Owns: matrices, used again for every adapter."""

    def __init__(self, base: Decoder) -> None:
        self._base = base
        self._matrices: dict[tuple[int, str], Tensor] = {}
        self.adapter: Adapter | None = None

    def is_complete(self) -> bool:
        return self._base.reader.is_complete()

    def layer(self, index: int) -> LayerWeights:
        assert self.adapter is not None
        layer, spec = self._base.layer(index), self._base.spec
        changes = self.adapter.layers[index] if index < len(self.adapter.layers) else {}
        q, kv, F = spec.query_dim, spec.kv_dim, spec.ffn_dim
        qkv = {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}
        gate_up = {"gate_proj": (0, F), "up_proj": (F, 2 * F)}
        whole = (0, spec.model_dim)
        return replace(
            layer,
            qkv_NM=self._matrix((index, "qkv"), layer.qkv_NM, qkv, changes),
            qkv_bias_N=_bias(layer.qkv_bias_N, qkv, changes),
            o_MN=self._matrix((index, "o"), layer.o_MN, {"o_proj": whole}, changes),
            o_bias_M=_bias(layer.o_bias_M, {"o_proj": whole}, changes),
            gate_up_NM=self._matrix((index, "gate_up"), layer.gate_up_NM, gate_up, changes),
            gate_up_bias_N=_bias(layer.gate_up_bias_N, gate_up, changes),
            down_MF=self._matrix((index, "down"), layer.down_MF, {"down_proj": whole}, changes),
            down_bias_M=_bias(layer.down_bias_M, {"down_proj": whole}, changes),
        )

    def embedding(self) -> Matrix:
        return self._base.reader.embedding()

    def positions(self) -> Tensor:
        return self._base.reader.positions()

    def final_norm(self) -> NormWeights:
        return self._base.reader.final_norm()

    def head(self) -> Matrix:
        return self._base.reader.head()

    def _matrix(
        self,
        key: tuple[int, str],
        base_NM: Matrix,
        rows: Mapping[str, tuple[int, int]],
        changes: Mapping[str, LoraWeights],
    ) -> Matrix:
        """Fill this adapter's copy of a fused matrix; one that it leaves alone stays the base's own."""
        assert isinstance(base_NM, Tensor)
        if not any(name in changes for name in rows):
            return base_NM
        if key not in self._matrices:
            self._matrices[key] = torch.empty_like(base_NM)
        merged_NM = self._matrices[key].copy_(base_NM)
        for name, (start, end) in rows.items():
            if name in changes:
                _merge_(merged_NM[start:end], changes[name])
        return merged_NM


def _merge_(weight_NM: Tensor, change: LoraWeights) -> None:
    """Make a weight what gain · W + b · a is, rounded once."""
    if change.gain_N is not None:
        sum_NM = weight_NM.float() * change.gain_N[:, None] + change.b_NR.float() @ change.a_RM.float()
        weight_NM.copy_(sum_NM)
    elif change.a_RM.shape[0]:
        # The rows of b as inputs that shrink to themselves: the op that adds an adapter adds it to the weights too.
        rank = change.a_RM.shape[0]
        same_RR = torch.eye(rank, dtype=weight_NM.dtype, device=weight_NM.device)
        segment = LoraSegment(0, weight_NM.shape[0], same_RR, change.a_RM.T)
        kernels.lora_add_(weight_NM, change.b_NR.contiguous(), [segment])


def _bias(
    base_N: Tensor | None, rows: Mapping[str, tuple[int, int]], changes: Mapping[str, LoraWeights]
) -> Tensor | None:
    """The base's bias under the adapter's gains and shifts."""
    touching = {
        name: changes[name]
        for name in rows
        if name in changes
        and (changes[name].shift_N is not None or not (changes[name].gain_N is None or base_N is None))
    }
    if not touching:
        return base_N
    one = next(iter(touching.values()))
    size = max(end for _, end in rows.values())
    bias_N = torch.zeros(size, device=one.a_RM.device) if base_N is None else base_N.to(torch.float32, copy=True)
    for name, change in touching.items():
        part_N = bias_N[rows[name][0] : rows[name][1]]
        if change.gain_N is not None:
            part_N *= change.gain_N
        if change.shift_N is not None:
            part_N += change.shift_N
    return bias_N.to(one.a_RM.dtype)

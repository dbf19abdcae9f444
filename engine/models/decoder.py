"""The one decoder: every family in `protocol.FAMILIES` is this code under another DecoderSpec.

Tokens of many sequences come packed in one row dimension T; only attention knows where each sequence begins.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nearline import kernels
from nearline.engine.kv_cache import KVCache
from nearline.engine.models.layers import WeightReader
from nearline.engine.models.lora import LoraPlan
from nearline.engine.models.rope import RopeTable
from nearline.kernels import AttentionMeta, FusedDecoder, FusedStep, LayerShape, LayerTensors
from nearline.protocol import DecoderSpec


@dataclass(frozen=True, slots=True)
class _Step:
    """What every layer of one forward pass shares."""

    positions_T: Tensor
    slots_T: Tensor
    meta: AttentionMeta
    kv: KVCache
    lora: LoraPlan | None


class Decoder:
    """Runs the layers in order; a layer's weights are awaited the first time it runs and kept ever after.

    So the first forward pass follows the checkpoint as it arrives, and later ones ask nobody. Where the kernels have
    a compiled decoder, all layers are one call; otherwise each op is one.
    """

    def __init__(self, spec: DecoderSpec, reader: WeightReader, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.layers: list[LayerTensors | None] = [None] * spec.num_layers
        self._reader = reader
        self._rope = RopeTable(spec, device)
        self._embedding_VM: Tensor | None = None
        self._final_norm_M: Tensor | None = None
        self._head_VM: Tensor | None = None
        self._windows = [spec.sliding_window if i in spec.sliding_layers else None for i in range(spec.num_layers)]
        self._has_rope = [i not in spec.no_rope_layers for i in range(spec.num_layers)]
        self._q_dim, self._kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._scale = spec.head_dim**-0.5
        self._fused: FusedDecoder | None = None
        if device.type == "cpu" and spec.activation == "silu":
            heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
            shape = LayerShape(*heads, spec.model_dim, spec.ffn_dim, spec.norm_eps, self._scale)
            self._fused = FusedDecoder(shape, spec.num_layers, dtype)
        self._is_loaded = False

    def reserve_positions(self, num_positions: int) -> None:
        """Make positions [0, num_positions) usable in `forward`."""
        self._rope.reserve(num_positions)

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        meta: AttentionMeta,
        kv: KVCache,
        lora: LoraPlan | None = None,
    ) -> Tensor:
        """Compute the final, normalised hidden state of every token and store its keys and values.

        Shapes: token_ids_T, positions_T, slots_T [T]; returns [T, M] in the compute dtype. Positions must have been
        reserved. Raises CheckpointCorrupt if the bytes of a layer cannot come.
        """
        residual_TM = F.embedding(token_ids_T, self._embedding())
        step = _Step(positions_T, slots_T, meta, kv, lora)
        if self._fused is not None and self._fused.accepts(token_ids_T.shape[0]):
            self._run_fused(self._fused, residual_TM, step)
        else:
            for index in range(self.spec.num_layers):
                self._run_layer(index, residual_TM, step)
        self._is_loaded = True
        return kernels.rms_norm(residual_TM, self._final_norm(), self.spec.norm_eps)

    def logits(self, hidden_BM: Tensor) -> Tensor:
        """Project hidden states onto the vocabulary. Shapes: [B, M] → [B, V] in fp32."""
        if self._head_VM is None:
            self._head_VM = self._reader.head()
        return kernels.linear(hidden_BM, self._head_VM, out_dtype=torch.float32)

    def _run_fused(self, fused: FusedDecoder, residual_TM: Tensor, step: _Step) -> None:
        num_layers = self.spec.num_layers
        packed = FusedStep(step.positions_T, step.slots_T, self._rope.table_SD, step.meta)
        adapters = step.lora.packed if step.lora is not None else ()
        fused.set_caches(step.kv.layers)
        if self._is_loaded:
            fused.run(residual_TM, packed, 0, num_layers, adapters)
            return
        for index in range(num_layers):
            self._layer(index)
            fused.run(residual_TM, packed, index, index + 1, adapters)

    def _run_layer(self, index: int, residual_TM: Tensor, step: _Step) -> None:
        """Add one layer to the residual stream, in place."""
        layer, eps = self._layer(index), self.spec.norm_eps
        k_cache, v_cache = step.kv.layers[index]
        x_TM = kernels.rms_norm(residual_TM, layer.input_norm_M, eps)
        qkv_TN = kernels.linear(x_TM, layer.qkv_NM, layer.qkv_bias_N)
        if step.lora is not None:
            step.lora.add_qkv_(index, qkv_TN, x_TM)
        q_THD, k_TKD, v_TKD = self._heads(qkv_TN, layer)
        if self._has_rope[index]:
            kernels.rope_(q_THD, k_TKD, step.positions_T, self._rope.table_SD)
        kernels.write_kv(k_TKD, v_TKD, k_cache, v_cache, step.slots_T)
        o_THD = kernels.paged_attention(q_THD, k_cache, v_cache, step.meta, self._scale, self._windows[index])
        o_TN = o_THD.view(o_THD.shape[0], self._q_dim)
        branch_TM = kernels.linear(o_TN, layer.o_MN, layer.o_bias_M)
        if step.lora is not None:
            step.lora.add_o_(index, branch_TM, o_TN)
        x_TM, _ = kernels.add_rms_norm(branch_TM, residual_TM, layer.mlp_norm_M, eps)
        residual_TM += self._mlp(index, layer, x_TM, step.lora)

    def _heads(self, qkv_TN: Tensor, layer: LayerTensors) -> tuple[Tensor, Tensor, Tensor]:
        """Split the fused projection into views of query, key and value heads, normalised if the family does so."""
        spec, num_tokens = self.spec, qkv_TN.shape[0]
        q_end, k_end = self._q_dim, self._q_dim + self._kv_dim
        q_THD = qkv_TN[:, :q_end].view(num_tokens, spec.num_heads, spec.head_dim)
        k_TKD = qkv_TN[:, q_end:k_end].view(num_tokens, spec.num_kv_heads, spec.head_dim)
        v_TKD = qkv_TN[:, k_end:].view(num_tokens, spec.num_kv_heads, spec.head_dim)
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q_THD = kernels.rms_norm(q_THD, layer.q_norm_D, spec.norm_eps)
            k_TKD = kernels.rms_norm(k_TKD, layer.k_norm_D, spec.norm_eps)
        return q_THD, k_TKD, v_TKD

    def _mlp(self, index: int, layer: LayerTensors, x_TM: Tensor, lora: LoraPlan | None) -> Tensor:
        gate_up_T2F = kernels.linear(x_TM, layer.gate_up_NM, layer.gate_up_bias_N)
        if lora is not None:
            lora.add_gate_up_(index, gate_up_T2F, x_TM)
        inner_TF = _gated(gate_up_T2F, self.spec.activation)
        down_TM = kernels.linear(inner_TF, layer.down_MF, layer.down_bias_M)
        if lora is not None:
            lora.add_down_(index, down_TM, inner_TF)
        return down_TM

    def _layer(self, index: int) -> LayerTensors:
        layer = self.layers[index]
        if layer is None:
            layer = self.layers[index] = self._reader.layer(index)
            if self._fused is not None:
                self._fused.set_layer(index, layer, self._has_rope[index], self._windows[index])
        return layer

    def _embedding(self) -> Tensor:
        if self._embedding_VM is None:
            self._embedding_VM = self._reader.embedding()
        return self._embedding_VM

    def _final_norm(self) -> Tensor:
        if self._final_norm_M is None:
            self._final_norm_M = self._reader.final_norm()
        return self._final_norm_M


def _gated(gate_up_T2F: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return kernels.silu_mul(gate_up_T2F)
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return (F.relu(gate_TF) if activation == "relu" else F.gelu(gate_TF, approximate="tanh")) * up_TF

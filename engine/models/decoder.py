"""The one decoder: every family in `protocol.FAMILIES` is this code under another DecoderSpec.

Tokens of many sequences come packed in one row dimension T; only attention knows where each sequence begins.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nearline import kernels
from nearline.engine.kv_cache import KVCache
from nearline.engine.models.layers import LayerReader, LayerWeights, Matrix, NormWeights
from nearline.engine.models.lora import HeadPlan, LoraPlan
from nearline.engine.models.rope import RopeTable
from nearline.kernels import AttentionMeta, FusedDecoder, FusedStep, LayerShape, Rope
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

    def __init__(self, spec: DecoderSpec, reader: LayerReader, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.layers: list[LayerWeights | None] = [None] * spec.num_layers
        self._reader, self._dtype = reader, dtype
        self._rope = RopeTable(spec, device)
        self._sliding_rope = self._rope if spec.sliding_rope_theta is None else RopeTable(spec, device, is_sliding=True)
        self._embedding_VM: Matrix | None = None
        self._positions_SM: Tensor | None = None
        self._final_norm_M: NormWeights | None = None
        self._head_VM: Matrix | None = None
        self._windows = [spec.sliding_window if i in spec.sliding_layers else None for i in range(spec.num_layers)]
        self._ropes = [_rope_of(spec, index) for index in range(spec.num_layers)]
        self._embedding_scale = _embedding_scale(spec, dtype)
        self._fused: FusedDecoder | None = None
        if device.type == "cpu":
            self._fused = FusedDecoder(_shape(spec), spec.num_layers, dtype)
        self._is_loaded = False

    @property
    def reader(self) -> LayerReader:
        """Where weights come from."""
        return self._reader

    def twin(self, reader: LayerReader) -> "Decoder":
        """Make a decoder of the same spec that takes its layers from another reader and shares all the rest."""
        twin = copy.copy(self)
        twin.layers, twin._reader, twin._is_loaded = [None] * self.spec.num_layers, reader, False
        if self._fused is not None:
            twin._fused = FusedDecoder(_shape(self.spec), self.spec.num_layers, self._dtype)
        return twin

    def reserve_positions(self, num_positions: int) -> None:
        """Make positions [0, num_positions) usable in `forward`."""
        self._rope.reserve(num_positions)
        self._sliding_rope.reserve(num_positions)

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
        residual_TM = self._embed(token_ids_T, positions_T, lora)
        step = _Step(positions_T, slots_T, meta, kv, lora)
        if self._fused is not None and self._fused.accepts(token_ids_T.shape[0]):
            self._run_fused(self._fused, residual_TM, step)
        else:
            for index in range(self.spec.num_layers):
                self._run_layer(index, residual_TM, step)
        self._is_loaded = True
        if self._final_norm_M is None:
            self._final_norm_M = self._reader.final_norm()
        return self._norm(residual_TM, self._final_norm_M)

    def logits(self, hidden_BM: Tensor, heads: HeadPlan | None = None) -> Tensor:
        """Project hidden states onto the vocabulary. Shapes: [B, M] → [B, V] in fp32."""
        if self._head_VM is None:
            self._head_VM = self._reader.head()
        logits_BV = kernels.linear(hidden_BM, self._head_VM, out_dtype=torch.float32)
        if heads is not None:
            heads.change_(logits_BV, hidden_BM)
        if self.spec.logits_scale != 1.0:
            logits_BV *= self.spec.logits_scale
        cap = self.spec.logits_softcap
        return logits_BV if cap is None else logits_BV.div_(cap).tanh_().mul_(cap)

    def _embed(self, token_ids_T: Tensor, positions_T: Tensor, lora: LoraPlan | None) -> Tensor:
        """Begin the residual stream: a fresh tensor, which the layers add to in place."""
        if self._embedding_VM is None:
            self._embedding_VM = self._reader.embedding()
        hidden_TM = kernels.embedding(token_ids_T, self._embedding_VM, self._dtype)
        if lora is not None:
            lora.embed_(hidden_TM, token_ids_T)
        if self._embedding_scale != 1.0:
            hidden_TM *= self._embedding_scale
        if self.spec.learned_positions:
            if self._positions_SM is None:
                self._positions_SM = self._reader.positions()
            hidden_TM += F.embedding(positions_T + self.spec.position_offset, self._positions_SM)
        return hidden_TM

    def _run_fused(self, fused: FusedDecoder, residual_TM: Tensor, step: _Step) -> None:
        num_layers = self.spec.num_layers
        tables = self._rope.table_SD, self._sliding_rope.table_SD
        packed = FusedStep(step.positions_T, step.slots_T, tables[0], step.meta, tables[1])
        adapters = step.lora.packed if step.lora is not None else ()
        fused.set_caches(step.kv.layers)
        if self._is_loaded or self._reader.is_complete():
            # All at once: between two layers their weights would have swept this code out of the caches, every time.
            for index in range(num_layers):
                self.layer(index)
            fused.run(residual_TM, packed, 0, num_layers, adapters)
            return
        for index in range(num_layers):
            self.layer(index)
            fused.run(residual_TM, packed, index, index + 1, adapters)

    def _run_layer(self, index: int, residual_TM: Tensor, step: _Step) -> None:
        """Add one layer to the residual stream, in place."""
        layer = self.layer(index)
        x_TM = residual_TM if layer.input_norm is None else self._norm(residual_TM, layer.input_norm)
        branch_TM = self._attention(index, layer, x_TM, step)
        x_TM = self._join(residual_TM, branch_TM, layer.attention_post_norm, layer.mlp_norm)
        branch_TM = self._mlp(index, layer, x_TM, step.lora)
        self._join(residual_TM, branch_TM, layer.mlp_post_norm, None)

    def _join(
        self, residual_TM: Tensor, branch_TM: Tensor, post: NormWeights | None, following: NormWeights | None
    ) -> Tensor:
        """Add a branch to the residual stream in place, and return what the next branch reads."""
        if post is not None:
            branch_TM = self._norm(branch_TM, post)
        if self.spec.residual_scale != 1.0:
            branch_TM *= self.spec.residual_scale
        if following is not None and following.bias_M is None:
            return kernels.add_rms_norm(branch_TM, residual_TM, following.weight_M, self.spec.norm_eps)[0]
        residual_TM += branch_TM
        return residual_TM if following is None else self._norm(residual_TM, following)

    def _norm(self, x_TM: Tensor, norm: NormWeights) -> Tensor:
        if norm.bias_M is None:
            return kernels.rms_norm(x_TM, norm.weight_M, self.spec.norm_eps)
        return kernels.layer_norm(x_TM, norm.weight_M, norm.bias_M, self.spec.norm_eps)

    def _attention(self, index: int, layer: LayerWeights, x_TM: Tensor, step: _Step) -> Tensor:
        spec, window = self.spec, self._windows[index]
        k_cache, v_cache = step.kv.layers[index]
        qkv_TN = kernels.linear(x_TM, layer.qkv_NM, layer.qkv_bias_N)
        if step.lora is not None:
            step.lora.add_qkv_(index, qkv_TN, x_TM)
        q_THD, k_TKD, v_TKD = self._heads(qkv_TN, layer)
        if self._ropes[index] == Rope.NONE:
            kernels.write_kv(k_TKD, v_TKD, k_cache, v_cache, step.slots_T)
        else:
            rope = self._rope if self._ropes[index] == Rope.MAIN else self._sliding_rope
            turn = step.positions_T, rope.table_SD
            kernels.rope_write_(q_THD, k_TKD, v_TKD, turn, (k_cache, v_cache), step.slots_T)
        o_THD = kernels.paged_attention(
            q_THD, k_cache, v_cache, step.meta, spec.score_scale, window, spec.attention_softcap
        )
        o_TN = o_THD.view(o_THD.shape[0], spec.query_dim)
        branch_TM = kernels.linear(o_TN, layer.o_MN, layer.o_bias_M)
        if step.lora is not None:
            step.lora.add_o_(index, branch_TM, o_TN)
        return branch_TM

    def _heads(self, qkv_TN: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Split the fused projection into views of query, key and value heads, normalised if the family does so."""
        spec, eps, k_end = self.spec, self.spec.norm_eps, self.spec.query_dim + self.spec.kv_dim
        q_TN, k_TN, v_TN = qkv_TN[:, : spec.query_dim], qkv_TN[:, spec.query_dim : k_end], qkv_TN[:, k_end:]
        q_norm, k_norm = layer.q_norm_D, layer.k_norm_D
        if q_norm is not None and k_norm is not None and spec.is_qk_norm_wide:
            q_TN, k_TN = kernels.rms_norm(q_TN, q_norm, eps), kernels.rms_norm(k_TN, k_norm, eps)
        q_THD = q_TN.view(-1, spec.num_heads, spec.head_dim)
        k_TKD = k_TN.view(-1, spec.num_kv_heads, spec.head_dim)
        if q_norm is not None and k_norm is not None and not spec.is_qk_norm_wide:
            q_THD, k_TKD = kernels.rms_norm(q_THD, q_norm, eps), kernels.rms_norm(k_TKD, k_norm, eps)
        return q_THD, k_TKD, v_TN.view(-1, spec.num_kv_heads, spec.head_dim)

    def _mlp(self, index: int, layer: LayerWeights, x_TM: Tensor, lora: LoraPlan | None) -> Tensor:
        gate_up_T2F = kernels.linear(x_TM, layer.gate_up_NM, layer.gate_up_bias_N)
        if lora is not None:
            lora.add_gate_up_(index, gate_up_T2F, x_TM)
        inner_TF = kernels.activate(gate_up_T2F, self.spec.activation, self.spec.is_gated)
        down_TM = kernels.linear(inner_TF, layer.down_MF, layer.down_bias_M)
        if lora is not None:
            lora.add_down_(index, down_TM, inner_TF)
        return down_TM

    def layer(self, index: int) -> LayerWeights:
        """Give a layer's weights; the first time they are read, and awaited."""
        layer = self.layers[index]
        if layer is None:
            layer = self.layers[index] = self._reader.layer(index)
            if self._fused is not None:
                self._fused.set_layer(index, layer.compiled(), self._ropes[index], self._windows[index])
        return layer


def _shape(spec: DecoderSpec) -> LayerShape:
    return LayerShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        model_dim=spec.model_dim,
        ffn_dim=spec.ffn_dim,
        norm_eps=spec.norm_eps,
        scale=spec.score_scale,
        softcap=spec.attention_softcap,
        residual_scale=spec.residual_scale,
        activation=spec.activation,
        is_gated=spec.is_gated,
        is_layer_norm=spec.is_layer_norm,
        is_qk_norm_wide=spec.is_qk_norm_wide,
        is_transposed=spec.is_transposed,
    )


def _rope_of(spec: DecoderSpec, layer: int) -> Rope:
    if layer in spec.no_rope_layers:
        return Rope.NONE
    is_sliding = spec.sliding_window is not None and layer in spec.sliding_layers
    return Rope.SLIDING if is_sliding and spec.sliding_rope_theta is not None else Rope.MAIN


def _embedding_scale(spec: DecoderSpec, dtype: torch.dtype) -> float:
    scale = spec.embedding_scale
    return float(torch.tensor(scale, dtype=dtype)) if spec.is_embedding_scale_rounded else scale

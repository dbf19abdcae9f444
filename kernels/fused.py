"""A run of decoder layers as one compiled call: what a small step on a CPU needs, because Python costs more than it.

Same functions as the single ops, hence the same bits. On a CPU only; everything else goes through the single ops.
"""

import ctypes
import enum
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nearline.kernels import native
from nearline.kernels.quant import QuantMatrix
from nearline.kernels.types import AttentionMeta

SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections an adapter may change, in the order of decoder.c."""
_AMX_SINGLE_OPS_FROM = 64
"""Tokens from which torch's products win on CPUs with bf16 tile units; not measured here."""


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """Weights of one layer, contiguous (transposes of such if the shape says so), of the activations' dtype; norms may
    all be float32 instead, projections quantised. What is None is not applied; post norms come before a half is added
    to the residual.

    Shapes: qkv [(H+2K)·D, M], o [M, H·D], gate_up [2F, M] ([F, M] without a gate), down [M, F]; query and key norms
    [H·D] and [K·D] if they are wide.
    """

    input_norm_M: Tensor | None
    input_norm_bias_M: Tensor | None
    qkv_NM: Tensor | QuantMatrix
    qkv_bias_N: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o_MN: Tensor | QuantMatrix
    o_bias_M: Tensor | None
    attention_post_norm_M: Tensor | None
    mlp_norm_M: Tensor | None
    mlp_norm_bias_M: Tensor | None
    gate_up_NM: Tensor | QuantMatrix
    gate_up_bias_N: Tensor | None
    down_MF: Tensor | QuantMatrix
    down_bias_M: Tensor | None
    mlp_post_norm_M: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What all layers of a decoder share.

    `softcap` as in paged_attention, `activation` and `is_gated` as in activate; `residual_scale` multiplies what each
    half adds; layer norms instead of RMS norms; query and key norms over all heads of a token (`is_qk_norm_wide`);
    projections stored [in, out] (`is_transposed`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_dim: int
    ffn_dim: int
    norm_eps: float
    scale: float
    softcap: float | None = None
    residual_scale: float = 1.0
    activation: str = "silu"
    is_gated: bool = True
    is_layer_norm: bool = False
    is_qk_norm_wide: bool = False
    is_transposed: bool = False


class Rope(enum.IntEnum):
    """Which table turns a layer's queries and keys; numbers of decoder.c."""

    NONE = 0
    MAIN = 1
    SLIDING = 2


@dataclass(frozen=True, slots=True)
class FusedStep:
    """The packed tokens of one step. Shapes: positions_T, slots_T int32; cos_sin_SR as in rope_, and of one shape."""

    positions_T: Tensor
    slots_T: Tensor
    cos_sin_SR: Tensor
    meta: AttentionMeta
    sliding_cos_sin_SR: Tensor | None = None
    """Table of layers with Rope.SLIDING."""


_FLAGS = ("is_gated", "is_layer_norm", "is_qk_norm_wide", "is_transposed")


class _Quant(ctypes.Structure):
    _fields_ = (("scales", c_void_p), ("offsets", c_void_p), ("bits", c_long))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((field.name, c_void_p) for field in fields(LayerTensors)),
        *((name, c_void_p) for name in ("k_cache", "v_cache")),
        *((name, c_long) for name in ("rope", "window")),
        *((name, _Quant) for name in ("qkv_quant", "o_quant", "gate_up_quant", "down_quant")),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, c_long) for name in ("model_dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")),
        *((name, c_long) for name in ("block_size", "num_blocks")),
        *((name, c_float) for name in ("eps", "scale", "softcap", "residual_scale")),
        *((name, c_int) for name in ("dtype", "norm_dtype", "activation", *_FLAGS)),
    )


class _Site(ctypes.Structure):
    _fields_ = (*((name, c_void_p) for name in ("a", "b", "gain", "shift")), ("rank", c_long))


class _Segment(ctypes.Structure):
    _fields_ = (("start", c_long), ("end", c_long), ("layers", c_void_p))


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("hidden", "cos_sin", "sliding_cos_sin")),
        ("num_tokens", c_long),
        *((name, c_void_p) for name in ("positions", "slots", "query_starts", "context_lens", "block_tables")),
        *((name, c_long) for name in ("num_positions", "rotated", "table_stride", "num_sequences")),
        ("segments", c_void_p),
        ("num_segments", c_long),
    )


class PackedAdapter:
    """An adapter's pairs as a table of pointers. Owns: its b matrices, turned once to be read along rows.

    `layers` holds per layer, by projection (see SITES), (a_RM, b_NR, gain_N, shift_N) as in LoraSegment.
    """

    def __init__(self, layers: Sequence[Mapping[str, tuple[Tensor, Tensor, Tensor | None, Tensor | None]]]) -> None:
        self._table: object = (table := (_Site * (len(SITES) * len(layers)))())
        self._kept: list[Tensor] = []
        for index, pairs in enumerate(layers):
            for number, name in enumerate(SITES):
                if name not in pairs:
                    continue
                a_RM, b_NR, gain_N, shift_N = pairs[name]
                a, b = a_RM.contiguous(), b_NR.T.contiguous()
                site = table[index * len(SITES) + number]
                site.a, site.b, site.rank = a.data_ptr(), b.data_ptr(), a.shape[0]
                self._kept += [a, b]
                for key, vector in (("gain", gain_N), ("shift", shift_N)):
                    if vector is not None:
                        self._kept.append(vector.float().contiguous())
                        setattr(site, key, self._kept[-1].data_ptr())
        self.address = ctypes.addressof(table)

    @classmethod
    def at(cls, table_S5: Tensor, kept: Sequence[Tensor]) -> "PackedAdapter":
        """Take a finished table: addresses of a, b, gain, shift (0: none) and the rank, for each layer's SITES in turn.

        Shapes: int64 [len(SITES) · layers, 5]. a [R, in] and b [R, out] contiguous, of the decoder's dtype. Owns:
        `kept`, the tensors at those addresses.
        """
        packed = cls(())
        packed._table, packed._kept, packed.address = table_S5, [*kept], table_S5.data_ptr()
        return packed


class FusedDecoder:
    """Runs layers [first, last) over packed tokens. Owns: references to every tensor whose address it holds."""

    def __init__(self, shape: LayerShape, num_layers: int, dtype: torch.dtype) -> None:
        self._lib = native.library()
        self._shape = _Shape(shape.model_dim, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.ffn_dim)
        self._shape.eps, self._shape.scale = shape.norm_eps, shape.scale
        self._shape.softcap, self._shape.residual_scale = shape.softcap or 0.0, shape.residual_scale
        self._shape.activation = native.ACTIVATIONS[shape.activation]
        for flag in _FLAGS:
            setattr(self._shape, flag, getattr(shape, flag))
        self._dtype = dtype
        self._shape.dtype = self._shape.norm_dtype = native.CODES.get(dtype, 0)
        self._layers = (_Layer * num_layers)()
        self._kept: list[LayerTensors | None] = [None] * num_layers
        self._caches: Sequence[tuple[Tensor, Tensor]] = ()

    def accepts(self, num_tokens: int) -> bool:
        """Tell whether a step of so many tokens should run here rather than op by op."""
        if self._lib is None or self._dtype not in native.CODES or self._shape.head_dim % 8:
            return False
        is_matrix_bound = self._dtype == torch.bfloat16 and num_tokens >= _AMX_SINGLE_OPS_FROM
        return not (is_matrix_bound and native.has_tile_units())

    def set_layer(self, index: int, tensors: LayerTensors, rope: Rope = Rope.MAIN, window: int | None = None) -> None:
        """Give layer `index` its weights. Raises ValueError for a dtype or layout that is not the decoder's."""
        layer = self._layers[index]
        norms = (tensors.input_norm_M, tensors.attention_post_norm_M)
        norm_dtype = next(norm.dtype for norm in norms if norm is not None)
        for field in fields(LayerTensors):
            tensor: Tensor | QuantMatrix | None = getattr(tensors, field.name)
            if tensor is None:
                continue
            if isinstance(tensor, QuantMatrix):
                codes, scales, offsets = tensor.pointers
                setattr(layer, field.name, codes)
                quant = _Quant(scales, offsets, tensor.bits)
                setattr(layer, field.name.rpartition("_")[0] + "_quant", quant)
                continue
            wanted = norm_dtype if "norm" in field.name else self._dtype
            is_plain = (tensor.T if tensor.dim() == 2 and self._shape.is_transposed else tensor).is_contiguous()
            if tensor.dtype != wanted or not is_plain or tensor.device.type != "cpu":
                raise ValueError(
                    f"layer {index}: {field.name} is {tensor.dtype} on {tensor.device}, not plain {wanted}"
                )
            setattr(layer, field.name, tensor.data_ptr())
        self._shape.norm_dtype = native.CODES[norm_dtype]
        layer.rope, layer.window = int(rope), window or 0
        self._kept[index] = tensors

    def set_caches(self, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Give every layer its (k_cache_NKPD, v_cache_NKPD), all of one shape. Cheap when they are already there."""
        if caches is self._caches:
            return
        for layer, (k_cache, v_cache) in zip(self._layers, caches, strict=True):
            if not native.are_caches(k_cache, v_cache, self._dtype):
                raise ValueError(f"caches must be contiguous {self._dtype} on the CPU")
            layer.k_cache, layer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
            self._shape.num_blocks, _, self._shape.block_size, _ = k_cache.shape
        self._caches = caches

    def run(
        self,
        hidden_TM: Tensor,
        step: FusedStep,
        first: int,
        last: int,
        adapters: Sequence[tuple[int, int, PackedAdapter]] = (),
    ) -> None:
        """Carry the residual stream through layers [first, last), in place; `adapters` are (start, end, adapter) rows.

        Raises IndexError for slots, blocks or positions outside their tables.
        """
        if self._lib is None or not all(self._kept[first:last]) or not self._caches:
            raise RuntimeError("FusedDecoder.run before accepts(), set_layer() and set_caches()")
        num_tokens = hidden_TM.shape[0]
        is_plain = hidden_TM.is_contiguous() and step.cos_sin_SR.is_contiguous() and native.is_plain_meta(step.meta)
        if hidden_TM.dtype != self._dtype or not is_plain:
            raise ValueError(f"hidden states must be contiguous {self._dtype} and the meta contiguous int32")
        positions = step.positions_T.to(torch.int32).contiguous()
        slots = step.slots_T.to(torch.int32).contiguous()
        starts, lens, tables, width, num_sequences = native.meta_pointers(step.meta)
        sliding_SR = step.cos_sin_SR if step.sliding_cos_sin_SR is None else step.sliding_cos_sin_SR
        if sliding_SR.shape != step.cos_sin_SR.shape or not sliding_SR.is_contiguous():
            raise ValueError(f"rope tables are {tuple(step.cos_sin_SR.shape)} and {tuple(sliding_SR.shape)}")
        packed = _Step(hidden_TM.data_ptr(), step.cos_sin_SR.data_ptr(), sliding_SR.data_ptr(), num_tokens)
        packed.positions, packed.slots, packed.query_starts, packed.context_lens = (
            positions.data_ptr(),
            slots.data_ptr(),
            starts,
            lens,
        )
        packed.block_tables, packed.table_stride, packed.num_sequences = tables, width, num_sequences
        packed.num_positions, packed.rotated = step.cos_sin_SR.shape
        segments = _segments(adapters, num_tokens)
        packed.segments, packed.num_segments = ctypes.addressof(segments), len(adapters)
        layers, shape = ctypes.addressof(self._layers), ctypes.addressof(self._shape)
        native.check(self._lib.nl_decoder_layers(shape, layers, first, last, ctypes.addressof(packed)))


def _segments(adapters: Sequence[tuple[int, int, PackedAdapter]], num_tokens: int) -> "ctypes.Array[_Segment]":
    segments = (_Segment * len(adapters))()
    for segment, (start, end, pack) in zip(segments, adapters, strict=True):
        if not 0 <= start <= end <= num_tokens:
            raise IndexError(f"adapter rows [{start}, {end}) lie outside a step of {num_tokens} tokens")
        segment.start, segment.end, segment.layers = start, end, pack.address
    return segments

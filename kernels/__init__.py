"""Tensor ops of the engine, one function per op; `reference.py` says what each computes.

Shape letters: T packed tokens, M model dim, H heads, K kv heads, D head dim, F ffn dim, N outputs or cache blocks,
P block size, R rank or rotated dims, V vocab. Which path runs (Triton, compiled C, plain torch) is decided inside.
"""

from nearline.kernels.dispatch import (
    activate,
    add_rms_norm,
    embedding,
    layer_norm,
    linear,
    lora_add_,
    paged_attention,
    rms_norm,
    rope_,
    rope_write_,
    sample,
    set_num_threads,
    write_kv,
)
from nearline.kernels.fused import FusedDecoder, FusedStep, LayerShape, LayerTensors, PackedAdapter, Rope
from nearline.kernels.quant import QuantMatrix
from nearline.kernels.types import AttentionMeta, LoraSegment

__all__ = [
    "AttentionMeta",
    "FusedDecoder",
    "FusedStep",
    "LayerShape",
    "LayerTensors",
    "LoraSegment",
    "PackedAdapter",
    "QuantMatrix",
    "Rope",
    "activate",
    "add_rms_norm",
    "embedding",
    "layer_norm",
    "linear",
    "lora_add_",
    "paged_attention",
    "rms_norm",
    "rope_",
    "rope_write_",
    "sample",
    "set_num_threads",
    "write_kv",
]

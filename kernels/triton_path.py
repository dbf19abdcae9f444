"""The Triton path as one module: what dispatch loads when it first meets a CUDA tensor."""

from nearline.kernels.triton_attention import paged_attention
from nearline.kernels.triton_lora import lora_add_
from nearline.kernels.triton_quant import quant_linear
from nearline.kernels.triton_rows import activate, layer_norm, rms_norm, rope_, rope_write_, write_kv
from nearline.kernels.triton_sampling import sample

__all__ = [
    "activate",
    "layer_norm",
    "lora_add_",
    "paged_attention",
    "quant_linear",
    "rms_norm",
    "rope_",
    "rope_write_",
    "sample",
    "write_kv",
]

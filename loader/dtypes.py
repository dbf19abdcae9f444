"""safetensors' dtype names and torch's."""

import torch

from nearline.protocol.errors import UnsupportedCheckpoint

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def torch_dtype(name: str, tensor: str) -> torch.dtype:
    """Raises UnsupportedCheckpoint naming the tensor if torch has no such dtype."""
    dtype = TORCH_DTYPES.get(name)
    if dtype is None:
        raise UnsupportedCheckpoint(f"tensor {tensor}: dtype {name} is not supported; convert it to a common one")
    return dtype

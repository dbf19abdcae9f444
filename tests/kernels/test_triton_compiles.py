"""Triton kernels become machine code for CUDA devices, which needs none: types, shared memory, operations."""

import os
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nearline.kernels import triton_attention, triton_lora, triton_quant, triton_rows, triton_sampling
from nearline.kernels.quant import GROUPS

pytestmark = pytest.mark.filterwarnings("ignore:.*TRITON_DEFAULT_FP_FUSION.*")
AMPERE, HOPPER = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)
SMALLEST_SHARED_BYTES = 99 << 10
"""What a program may use on devices of the smallest kind since Ampere."""
POINTERS = {
    "positions": "*i32", "slots": "*i32", "starts": "*i32", "lens": "*i32", "tables": "*i32", "table": "*fp32",
    "w": "*fp32", "b": "*fp32", "parts": "*fp32", "tops": "*fp32", "sums": "*fp32", "shrunk": "*fp32",
    "wishes": "*fp64", "logits": "*fp32",
}  # fmt: skip
ACTIVATIONS = {"q", "k", "v", "k_cache", "v_cache", "x", "y", "residual", "out"}
FLOATS = {"eps", "scale", "softcap"}


def compile_for(target: GPUTarget, kernel: Any, dtype: str, constants: Mapping[str, Any], **options: Any) -> Any:
    """Compile with `dtype` activations; types of the other arguments follow from their names."""

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in ACTIVATIONS:
            return f"*{dtype}"
        return POINTERS.get(name, "fp32" if name in FLOATS else "i32")

    signature = {name: type_of(name) for name in kernel.arg_names} | options.pop("types", {})
    source = ASTSource(kernel, signature, dict(constants))
    return triton.compile(source, target=target, options=options)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(128, "bf16"), *(pytest.param(dim, "fp32", marks=pytest.mark.slow) for dim in (64, 256)), (256, "bf16")],
)
@pytest.mark.parametrize("is_decode", [True, False])
def test_attention_fits_the_shared_memory_of_small_devices(head_dim: int, dtype: str, is_decode: bool) -> None:
    bytes_each = 4 if dtype == "fp32" else 2
    rows = triton_attention.rows_per_program(is_decode, head_dim * bytes_each)
    shape = {
        "GROUP": 4, "GROUP_WIDTH": 4, "QUERIES": triton_attention.queries_per_program(rows, 4),
        "POSITIONS": triton_attention.positions_per_tile(head_dim, bytes_each), "BLOCK": 16, "DIM": head_dim,
        "DIM_WIDTH": head_dim, "SPLIT": 512 if is_decode else 0, "UPCAST": dtype == "fp32", "HAS_CAP": True,
    }  # fmt: skip
    compiled = compile_for(AMPERE, triton_attention._attend_kernel, dtype, shape, num_stages=2)
    assert compiled.metadata.shared <= SMALLEST_SHARED_BYTES


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_kernels_of_rows_and_adapters_compile(dtype: str) -> None:
    rows, lora = triton_rows, triton_lora
    upcast = dtype == "fp32"
    for kernel, constants in (
        (rows._norm_kernel, {"HAS_RESIDUAL": True, "WIDTH": 1024}),
        (rows._layer_norm_kernel, {"WIDTH": 1024}),
        (rows._rope_kernel, {"WIDTH": 64}),
        (rows._write_kernel, {"WIDTH": 128}),
        (rows._rope_write_kernel, {"WIDTH": 128}),
        *((rows._activate_kernel, {"GATED": True, "KIND": kind, "WIDTH": 1024}) for kind in rows.KINDS.values()),
        (triton_attention._merge_kernel, {"DIM": 80, "DIM_WIDTH": 128, "SPLITS": 4}),
    ):
        assert compile_for(HOPPER, kernel, dtype, constants).asm["cubin"]
    table = {"table": "*i64"}
    shrink = {"TOKENS": 16, "DIMS": 64, "RANKS": 16, "UPCAST": upcast}
    assert compile_for(HOPPER, lora._shrink_kernel, dtype, shrink, types=table).asm["cubin"]
    expand = {"TOKENS": 16, "OUTPUTS": 128, "RANKS": 16}
    assert compile_for(HOPPER, lora._expand_kernel, dtype, expand, types=table).asm["cubin"]


@pytest.mark.parametrize("bits", [8, 4])
def test_products_with_quantised_weights_compile(bits: int) -> None:
    types = {"codes": "*u8", "scales": "*bf16", "offsets": "*bf16", "bias": "*bf16"}
    constants = {
        "BITS": bits, "GROUP": GROUPS[bits], "LANES": 16, "TOKENS": 64, "OUTPUTS": 64, "HAS_BIAS": True,
        "UPCAST": False,
    }  # fmt: skip
    compiled = compile_for(HOPPER, triton_quant._quant_kernel, "bf16", constants, types=types)
    assert compiled.metadata.shared <= SMALLEST_SHARED_BYTES


def test_sampling_compiles() -> None:
    constants = {"TOP_BIT": 29, "WIDTH": 4096}
    assert compile_for(HOPPER, triton_sampling._sample_kernel, "i64", constants, num_warps=8).asm["cubin"]

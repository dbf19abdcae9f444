"""Products with weights of 8 and 4 bits against plain sums over the weights they stand for."""

import numpy as np
import pytest
import torch
from torch import Tensor

from nearline import kernels
from nearline.checkpoint_store.quantize_codes import decode, encode
from nearline.kernels import QuantMatrix, build, native
from nearline.protocol import QUANT_FORMATS
from tests.kernels.paged import DTYPES


def coded(rows: int, columns: int, bits: int) -> tuple[QuantMatrix, Tensor]:
    """A random matrix in codes, and what the codes stand for according to numpy."""
    wanted = QUANT_FORMATS[f"int{bits}"]
    values = (torch.randn(rows, columns) * columns**-0.5).numpy()
    parts = encode(values, wanted)
    stands_for = decode((parts.codes, parts.scales, parts.offsets), wanted, (rows, columns))

    def vectors(bits16: np.ndarray) -> Tensor:
        return torch.from_numpy(bits16.copy()).view(torch.bfloat16)

    offsets = None if parts.offsets is None else vectors(parts.offsets)
    matrix = QuantMatrix(torch.from_numpy(parts.codes), vectors(parts.scales), offsets, (rows, columns))
    return matrix, torch.from_numpy(stands_for.copy())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (1, 1), (17, 33), (40, 100), (96, 576), (250, 130)])
def test_products_are_those_of_the_weights_the_codes_stand_for(
    rows: int, columns: int, bits: int, every_tier: str
) -> None:
    torch.manual_seed(0)
    matrix, weights = coded(rows, columns, bits)
    bias = torch.randn(rows)
    for num_tokens in (0, 1, 2, 3, 7, 8, 33, 70):
        x = torch.randn(num_tokens, columns)
        wanted = x.double() @ weights.double().T + bias
        # Activations keep 15 bits: each is off by at most half a step of its group's largest.
        slack = x.abs().max().item() / 65534 * weights.abs().sum(dim=1).max().item() + 1e-5 if num_tokens else 0
        found = kernels.linear(x, matrix, bias)
        assert found.shape == (num_tokens, rows)
        assert not num_tokens or (found.double() - wanted).abs().max().item() <= slack


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_alone_and_in_any_batch(dtype: torch.dtype, bits: int, compiled: None) -> None:
    matrix, _weights = coded(70, 200, bits)
    x = torch.randn(300, 208).to(dtype)[:, :200]
    whole, logits = kernels.linear(x, matrix), kernels.linear(x, matrix, out_dtype=torch.float32)
    for start, end in ((0, 1), (1, 3), (3, 6), (6, 13), (13, 31), (31, 231)):
        assert torch.equal(kernels.linear(x[start:end], matrix), whole[start:end])
        assert torch.equal(kernels.linear(x[start:end], matrix, out_dtype=torch.float32), logits[start:end])
    assert torch.equal(whole, logits.to(dtype))


@pytest.mark.parametrize("bits", [8, 4])
def test_every_build_gives_the_same_bits(bits: int, every_tier: str) -> None:
    torch.manual_seed(1)
    matrix, _weights = coded(48, 192, bits)
    x = torch.randn(9, 192)
    best = native.load(build.library())
    found = kernels.linear(x, matrix)
    y = torch.empty(9, 48)
    best.nl_quant_linear(x.data_ptr(), 192, *matrix.pointers, None, y.data_ptr(), 48, 9, 48, 192, 0, 0, bits)
    if every_tier == "portable":  # no fused multiply-add there
        torch.testing.assert_close(found, y, atol=1e-4, rtol=1e-4)
    else:
        assert torch.equal(found, y)


@pytest.mark.parametrize("bits", [8, 4])
def test_torch_decodes_what_numpy_coded_and_looks_rows_up(bits: int, compiled: None) -> None:
    matrix, weights = coded(50, 72, bits)
    assert torch.equal(matrix.dequantised(torch.float32), weights)
    ids = torch.tensor([49, 0, 17, 17])
    assert torch.equal(kernels.embedding(ids, matrix, torch.bfloat16), weights[ids].bfloat16())
    with pytest.raises(IndexError, match="row"):
        kernels.embedding(torch.tensor([50]), matrix, torch.float32)


@pytest.mark.parametrize("bits", [8, 4])
def test_without_a_compiler_torch_serves(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, weights = coded(50, 72, bits)
    monkeypatch.setattr(native, "library", lambda: None)
    x = torch.randn(5, 72)
    torch.testing.assert_close(kernels.linear(x, matrix), x @ weights.T)
    ids = torch.tensor([49, 0, 17])
    assert torch.equal(kernels.embedding(ids, matrix, torch.float32), weights[ids])


@pytest.mark.parametrize("bits", [8, 4])
def test_tensors_of_another_shape_are_refused_before_a_loop_reads_them(bits: int) -> None:
    matrix, _weights = coded(32, 64, bits)
    with pytest.raises(ValueError, match=r"a matrix of \[33, 64\]"):
        QuantMatrix(matrix.codes, matrix.scales, matrix.offsets, (33, 64))
    with pytest.raises(ValueError, match=r"do not fit weights \[32, 64\]"):
        kernels.linear(torch.randn(2, 65), matrix)

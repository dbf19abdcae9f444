"""Rounding is torch's, whoever imports: models from GGUF, adapters, codes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearline.checkpoint_store.numbers import from_bfloat16, to_bfloat16, to_dtype

floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False))
TORCHS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@given(floats)
def test_rounding_to_bfloat16_and_back_is_torchs(values: list[float]) -> None:
    theirs = torch.tensor(values, dtype=torch.float32)
    ours = to_bfloat16(theirs.numpy())
    assert torch.equal(torch.from_numpy(ours.view("int16")), theirs.to(torch.bfloat16).view(torch.int16))
    assert torch.equal(torch.from_numpy(from_bfloat16(ours)), theirs.to(torch.bfloat16).float())


@pytest.mark.parametrize("dtype", TORCHS)
@given(values=floats)
def test_numbers_of_a_dtype_are_torchs_bytes_or_refused_where_they_become_infinite(
    dtype: str, values: list[float]
) -> None:
    theirs = torch.tensor(values, dtype=torch.float32).to(TORCHS[dtype])
    wanted = theirs.view(torch.uint8).numpy().tobytes() if theirs.isfinite().all() else None
    assert to_dtype(np.array(values, np.float32), dtype) == wanted

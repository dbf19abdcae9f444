"""What a device samples is what the host would: the same token of the same seed and position."""

import pytest
import torch

from nearline import kernels
from nearline.engine.distribution import draw, wishes_of
from nearline.protocol import SamplingParams

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.3, top_k=7, seed=2),
    SamplingParams(temperature=1.0, top_p=0.7, seed=3),
    SamplingParams(temperature=0.9, min_p=0.05, seed=4),
    SamplingParams(temperature=1.1, top_k=30, top_p=0.5, min_p=0.01, seed=5),
    SamplingParams(temperature=1e-6, seed=6),
]


@pytest.mark.parametrize("params", PARAMS)
def test_the_device_op_draws_the_hosts_token(params: SamplingParams) -> None:
    logits = torch.randn(60, 500, generator=torch.Generator().manual_seed(8)) * 2
    logits[:, 100:120] = logits[:, :20]  # ties
    wishes = torch.tensor([wishes_of(params, position) for position in range(60)], dtype=torch.float64).T.contiguous()
    tokens = kernels.sample(logits, wishes).tolist()
    is_greedy = params.temperature < 1e-5
    rows = logits.numpy()
    assert tokens == [int(row.argmax()) if is_greedy else draw(row, params, at) for at, row in enumerate(rows)]


def test_rows_without_a_finite_best_say_so() -> None:
    logits = torch.zeros(4, 10)
    logits[0, 3], logits[1], logits[2, 5] = float("nan"), float("-inf"), float("inf")
    wishes = torch.tensor([wishes_of(PARAMS[1], 0)] * 4, dtype=torch.float64).T.contiguous()
    tokens = kernels.sample(logits, wishes).tolist()
    assert tokens[:3] == [-1, -1, -1]
    assert tokens[3] >= 0

"""Far from the start windows have moved on and frequencies are scaled: the logits are still those of transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.conftest import SMALLER
from tests.engine.models.test_decoder import FAMILIES as LLAMAS
from tests.engine.models.test_families import FAMILIES as OTHERS

CASES = {
    **{name: LLAMAS[name] for name in ("mistral with a window", "qwen2", "qwen3", "smollm3")},
    **{name: OTHERS[name] for name in ("granite", "olmo2", "phi3 with longrope", "gemma", "gemma2", "gpt2", "opt")},
    "gemma3 with rope scaling": OTHERS["gemma3 with rope scaling"],
}


@pytest.mark.parametrize("family", CASES)
def test_a_long_context_equals_transformers_at_position_2000(
    family: str, tiny_model: Callable[..., Any], bind: Any, oracle_logits: Any, prompt: Any
) -> None:
    name, overrides = CASES[family]
    model, tokens = tiny_model(name, **(SMALLER | overrides)), prompt(2010)
    ours, theirs = bind(model).logits(tokens, chunk=512), oracle_logits(model, tokens)
    torch.testing.assert_close(ours[-16:], theirs[-16:], atol=1e-4, rtol=0)

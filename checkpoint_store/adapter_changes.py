"""What an adapter does to a projection's output besides adding B A x: gains (DoRA) and shifts (trained biases).

With them the output is gain · y + shift + gain · scaling · B A x, where y is what the base computes, its bias included.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from nearline.checkpoint_store.adapter_modules import AdapterModule
from nearline.checkpoint_store.convert_types import Block, DraftTensor
from nearline.checkpoint_store.numbers import DTYPES, Floats, finite_blocks, read_float32
from nearline.checkpoint_store.safetensors_file import StoredTensor
from nearline.protocol.errors import UnsupportedCheckpoint

_ROWS = 512
"""Rows of a base weight whose change is computed at once."""


def draft_tensors(module: AdapterModule, scaling: float, base: Mapping[str, StoredTensor]) -> Iterator[DraftTensor]:
    """Describe a module's tensors: A and B as they are, gain and shift in float32, computed when they are written.

    Raises UnsupportedCheckpoint when gain or shift need base weights that are not there as plain numbers.
    """
    for part in "AB":
        if part in module.parts:
            tensor = module.parts[part]
            yield _stored(f"{module.name}.lora_{part}", tensor)
    has_gain = "magnitude_vector" in module.parts
    if has_gain:
        _check_base(module, base, "weight")
        yield _computed(module, "gain", lambda: _gain(module, scaling, base))
    if "bias" in module.parts or (has_gain and f"{module.name}.bias" in base):
        _check_base(module, base, "bias")
        yield _computed(module, "shift", lambda: _shift(module, scaling, base))


def _check_base(module: AdapterModule, base: Mapping[str, StoredTensor], kind: str) -> None:
    tensor = base.get(f"{module.name}.{kind}")
    if tensor is None or tensor.entry.dtype not in DTYPES:
        found = "is not in its file" if tensor is None else f"is {tensor.entry.dtype}"
        raise UnsupportedCheckpoint(
            f"the adapter scales {module.name!r} by its norm (DoRA) or changes its bias, which needs the base's {kind} "
            f"as F32, F16 or BF16, but that {found}; import the base again, converted and not quantised"
        )


def _stored(name: str, tensor: StoredTensor) -> DraftTensor:
    entry = tensor.entry
    return DraftTensor(name, entry.dtype, entry.shape, entry.num_bytes, lambda: finite_blocks(tensor))


def _computed(module: AdapterModule, what: str, compute: Callable[[], Floats]) -> DraftTensor:
    part = module.parts.get("magnitude_vector") or module.parts["bias"]
    num_outputs = part.entry.shape[0]

    def blocks() -> Iterator[Block]:
        yield compute().astype("<f4").tobytes()

    return DraftTensor(f"{module.name}.{what}", "F32", (num_outputs,), 4 * num_outputs, blocks)


def _gain(module: AdapterModule, scaling: float, base: Mapping[str, StoredTensor]) -> Floats:
    """Magnitude over the norm of each row of W + scaling · B A. Source: DoRA, as peft computes it."""
    weight = read_float32(base[f"{module.name}.weight"])
    a, b = read_float32(module.parts["A"]), read_float32(module.parts["B"])
    norms = [
        np.linalg.norm(weight[row : row + _ROWS] + np.float32(scaling) * (b[row : row + _ROWS] @ a), axis=1)
        for row in range(0, len(weight), _ROWS)
    ]
    gain: Floats = read_float32(module.parts["magnitude_vector"]).reshape(-1) / np.concatenate(norms)
    return gain


def _shift(module: AdapterModule, scaling: float, base: Mapping[str, StoredTensor]) -> Floats:
    """The bias it should have, less what the base's own has become under the gain."""
    before = read_float32(base[f"{module.name}.bias"])
    after = read_float32(module.parts["bias"]) if "bias" in module.parts else before
    gain = _gain(module, scaling, base) if "magnitude_vector" in module.parts else np.float32(1.0)
    return after.reshape(-1) - gain * before

"""What an adapter does to a projection's output besides adding B A x: gains (DoRA) and shifts (trained biases).

With them the output is gain · y + shift + gain · scaling · B A x, where y is what the base computes, its bias included.
"""

from collections.abc import Mapping

import numpy as np

from nearline.checkpoint_store.adapter_modules import AdapterModule
from nearline.checkpoint_store.numbers import DTYPES, Floats, read_float32
from nearline.checkpoint_store.safetensors_file import StoredTensor
from nearline.protocol.errors import UnsupportedCheckpoint

_ROWS = 512
"""Rows of a base weight whose change is computed at once."""

Stored = Mapping[str, StoredTensor]


def changes(module: AdapterModule, base: Stored) -> tuple[str, ...]:
    """Which of "gain" and "shift" a module has.

    Raises UnsupportedCheckpoint when they need base weights that are not there as plain numbers.
    """
    found = []
    if "magnitude_vector" in module.parts:
        _check_base(module, base, "weight")
        found.append("gain")
    if "bias" in module.parts or (found and f"{module.name}.bias" in base):
        _check_base(module, base, "bias")
        found.append("shift")
    return tuple(found)


def gain(module: AdapterModule, scaling: float, base: Stored) -> Floats:
    """Magnitude over the norm of each row of W + scaling · B A. Source: DoRA, as peft computes it."""
    weight = read_float32(base[f"{module.name}.weight"])
    a, b = read_float32(module.parts["A"]), read_float32(module.parts["B"])
    norms = [
        np.linalg.norm(weight[row : row + _ROWS] + np.float32(scaling) * (b[row : row + _ROWS] @ a), axis=1)
        for row in range(0, len(weight), _ROWS)
    ]
    found: Floats = read_float32(module.parts["magnitude_vector"]).reshape(-1) / np.concatenate(norms)
    return found


def shift(module: AdapterModule, scaling: float, base: Stored) -> Floats:
    """The bias it should have, less what the base's own has become under the gain."""
    before = read_float32(base[f"{module.name}.bias"])
    after = read_float32(module.parts["bias"]) if "bias" in module.parts else before
    factor = gain(module, scaling, base) if "magnitude_vector" in module.parts else np.float32(1.0)
    return after.reshape(-1) - factor * before


def _check_base(module: AdapterModule, base: Stored, kind: str) -> None:
    tensor = base.get(f"{module.name}.{kind}")
    if tensor is None or tensor.entry.dtype not in DTYPES:
        found = "is not in its file" if tensor is None else f"is {tensor.entry.dtype}"
        raise UnsupportedCheckpoint(
            f"the adapter scales {module.name!r} by its norm (DoRA) or changes its bias, which needs the base's {kind} "
            f"as F32, F16 or BF16, but that {found}; import the base again, converted and not quantised"
        )

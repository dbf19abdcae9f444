"""Helpers for import tests: read a published checkpoint back, damage a source, write odd safetensors files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.types import WEIGHTS_NAME, Manifest
from nearline.protocol import CheckpointKind

Raw = tuple[str, tuple[int, ...], bytes]
"""(safetensors dtype, shape, bytes)"""


def import_model(root: Path, source: Path | str, warnings: list[str] | None = None) -> Manifest:
    reporter = Reporter(warn=[].append if warnings is None else warnings.append)
    return import_checkpoint(root, CheckpointKind.MODEL, str(source), reporter=reporter)


def published(root: Path, manifest: Manifest) -> Path:
    return root / "checkpoints" / manifest.digest


def read_raw(path: Path) -> dict[str, Raw]:
    """Read a safetensors file by its own rules, without our reader."""
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    header.pop("__metadata__", None)
    data = blob[8 + length :]
    return {
        name: (entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def write_raw(path: Path, tensors: Mapping[str, Raw]) -> None:
    """Write a safetensors file by its own rules, without our writer."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def edit_tensors(directory: Path, **changes: Any) -> None:
    """Replace (`name=Raw`), or drop (`name=None`), tensors of a directory's model.safetensors."""
    path = directory / WEIGHTS_NAME
    tensors: dict[str, Any] = {**read_raw(path), **changes}
    write_raw(path, {name: raw for name, raw in tensors.items() if raw is not None})


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def names_in_file_order(path: Path) -> list[str]:
    with safe_open(path, "np") as file:
        return list(file.offset_keys())


def leftovers(root: Path) -> list[str]:
    """Name everything an import may have left behind, committed or not."""
    return sorted(str(p.relative_to(root)) for part in ("incoming", "checkpoints") for p in (root / part).glob("*"))


def random_f32(shape: tuple[int, ...], seed: int = 0) -> Raw:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return "F32", shape, values.tobytes()

"""Lays an adapter's numbers out as an engine takes them over: protocol/adapter_layout.py says how."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nearline.checkpoint_store import adapter_changes
from nearline.checkpoint_store.adapter_modules import AdapterModule
from nearline.checkpoint_store.convert_types import Block, DraftTensor
from nearline.checkpoint_store.numbers import Floats, read_float32, to_dtype
from nearline.checkpoint_store.safetensors_file import StoredTensor
from nearline.protocol import DecoderSpec
from nearline.protocol.adapter_layout import (
    COLUMNS,
    MATRICES,
    PIECE_ALIGNMENT,
    PROJECTION_GROUPS,
    PROJECTIONS,
    SITES,
    TABLES,
    VECTORS,
)
from nearline.protocol.errors import CheckpointCorrupt

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class PlacedModule:
    """A module, checked, with its rank (0: a mere bias), its scaling and the row of SITES it fills."""

    module: AdapterModule
    row: int
    rank: int
    scaling: float

    @property
    def shape(self) -> tuple[int, int]:
        """Columns and rows of the base's weight, as far as A and B tell."""
        if not self.rank:
            return 0, next(iter(self.module.parts.values())).entry.shape[0]
        a, b = (self.module.parts[part].entry.shape for part in "AB")
        return a[1], b[0]


@dataclass(slots=True)
class _Flat:
    """A flat tensor in the making: numbers to compute when it is written, and where each begins."""

    item_bytes: int
    num_bytes: int = 0
    pieces: list[tuple[int, Callable[[], Floats]]] = field(default_factory=list)

    def add(self, count: int, compute: Callable[[], Floats]) -> int:
        offset = self.num_bytes
        self.pieces.append((offset, compute))
        self.num_bytes += count * self.item_bytes
        return offset

    def align(self) -> None:
        self.num_bytes += -self.num_bytes % PIECE_ALIGNMENT

    def draft(self, name: str, dtype: str) -> DraftTensor:
        def blocks() -> Iterator[Block]:
            done = 0
            for offset, compute in self.pieces:
                content = to_dtype(compute(), dtype)
                if content is None:
                    raise CheckpointCorrupt(
                        f"the adapter's numbers, scaled by lora_alpha or alpha_pattern, do not fit the base's dtype "
                        f"{dtype}; train it again"
                    )
                yield bytes(offset - done) + content
                done = offset + len(content)
            yield bytes(self.num_bytes - done)

        return DraftTensor(name, dtype, (self.num_bytes // self.item_bytes,), self.num_bytes, blocks)


def row_of(name: str, spec: DecoderSpec) -> int:
    """The row of SITES of a module named as the base's weight is (`model.layers.3.mlp.up_proj`, `lm_head`)."""
    leaf = name.rpartition(".")[2]
    if leaf in TABLES:
        return len(PROJECTIONS) * spec.num_layers + TABLES.index(leaf)
    return len(PROJECTIONS) * int(name.split(".")[2]) + PROJECTIONS.index(leaf)


def draft_pack(
    placed: Sequence[PlacedModule], base: Mapping[str, StoredTensor], spec: DecoderSpec, dtype: str
) -> tuple[DraftTensor, ...]:
    """Describe MATRICES, VECTORS and SITES of modules in the order of their rows."""
    matrices, vectors = _Flat(ITEM_BYTES[dtype]), _Flat(4)
    sites = np.full((len(PROJECTIONS) * spec.num_layers + len(TABLES), len(COLUMNS)), -1, np.int64)
    sites[:, 4:] = 0
    for group in _groups(placed):
        matrices.align()
        for one in group:
            if one.rank:
                sites[one.row, 0] = matrices.add(one.rank * one.shape[0], _matrix_a(one))
        for one in group:
            if one.rank:
                sites[one.row, 1] = matrices.add(one.rank * one.shape[1], _matrix_b(one, base))
        for one in group:
            sites[one.row, 4:] = one.rank, *one.shape
            for column, what in ((2, "gain"), (3, "shift")):
                if what in adapter_changes.changes(one.module, base):
                    sites[one.row, column] = vectors.add(one.shape[1], _vector(one, what, base))
    matrices.align()
    table = sites.astype("<i8").tobytes()
    drafts = [matrices.draft(MATRICES, dtype)]
    if vectors.pieces:
        vectors.align()
        drafts.append(vectors.draft(VECTORS, "F32"))
    return (*drafts, DraftTensor(SITES, "I64", sites.shape, len(table), lambda: iter([table])))


def _groups(placed: Sequence[PlacedModule]) -> Iterator[list[PlacedModule]]:
    """Modules that read the same input, in the order in which they run."""
    by_group: dict[tuple[int, int], list[PlacedModule]] = {}
    for one in placed:
        leaf = one.module.name.rpartition(".")[2]
        group = next((i for i, names in enumerate(PROJECTION_GROUPS) if leaf in names), one.row)
        by_group.setdefault((one.module.layer, group), []).append(one)
    yield from by_group.values()


def _matrix_a(one: PlacedModule) -> Callable[[], Floats]:
    def compute() -> Floats:
        a = read_float32(one.module.parts["A"])
        return np.ascontiguousarray(a.T) if one.module.is_embedding else a

    return compute


def _matrix_b(one: PlacedModule, base: Mapping[str, StoredTensor]) -> Callable[[], Floats]:
    def compute() -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite then is refused
            scaled: Floats = read_float32(one.module.parts["B"]) * np.float32(one.scaling)
            if "gain" in adapter_changes.changes(one.module, base):
                scaled *= adapter_changes.gain(one.module, one.scaling, base)[:, None]
        return np.ascontiguousarray(scaled.T)

    return compute


def _vector(one: PlacedModule, what: str, base: Mapping[str, StoredTensor]) -> Callable[[], Floats]:
    compute = adapter_changes.gain if what == "gain" else adapter_changes.shift
    return lambda: compute(one.module, one.scaling, base)

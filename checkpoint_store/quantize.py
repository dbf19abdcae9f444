"""Quantises a draft on its way to disk: matrices are coded some rows at a time while the publisher writes them."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from nearline.checkpoint_store.convert_files import CONFIG_NAME, to_json
from nearline.checkpoint_store.convert_model import DTYPE_BYTES, DTYPE_NAMES, read_spec
from nearline.checkpoint_store.convert_types import Block, Draft, DraftTensor
from nearline.checkpoint_store.numbers import Bits16, Floats, floats_of
from nearline.checkpoint_store.quantize_codes import encode
from nearline.protocol import (
    CheckpointInfo,
    QuantFormat,
    TensorSlot,
    coded_shape,
    quantised_roles,
    tensor_slots,
)
from nearline.protocol.errors import CheckpointCorrupt, UnsupportedCheckpoint
from nearline.protocol.quantization import LANES, OFFSET, SCALE, is_turned

REPORT_NAME = "quantization.json"
"""Small file beside the weights: format and relative error of every quantised matrix."""
_VALUES_AT_ONCE = 1 << 19


@dataclass(slots=True)
class _Matrix:
    """One matrix being coded. Its scales wait here for their place in the file, behind the codes."""

    draft: DraftTensor
    shape: tuple[int, ...]
    wanted: QuantFormat
    is_turned: bool
    scales: list[Bits16] = field(default_factory=list)
    offsets: list[Bits16] = field(default_factory=list)
    squared: float = 0.0
    squared_error: float = 0.0

    def tensors(self) -> dict[str, DraftTensor]:
        """The tensors it becomes, by the suffix of their names."""
        name, shape = self.draft.name, self.wanted.scale_shape(self.shape)
        code_shape = self.wanted.code_shape(self.shape)
        tensors = {"": DraftTensor(name, "U8", code_shape, math.prod(code_shape), self._codes)}
        for suffix, vectors in ((SCALE, self._scales), (OFFSET, self._offsets)):
            if suffix == SCALE or self.wanted.has_offsets:
                tensors[suffix] = DraftTensor(name + suffix, "BF16", shape, 2 * math.prod(shape), vectors)
        return tensors

    @property
    def relative_error(self) -> float:
        return math.sqrt(self.squared_error / self.squared) if self.squared else 0.0

    def _codes(self) -> Iterator[Block]:
        self.scales, self.offsets, self.squared, self.squared_error = [], [], 0.0, 0.0
        for rows in self._rows():
            if not np.isfinite(rows).all():
                raise CheckpointCorrupt(f"tensor {self.draft.name!r} holds NaN or infinity; fetch the model again")
            coded = encode(rows, self.wanted)
            self.scales.append(coded.scales)
            if coded.offsets is not None:
                self.offsets.append(coded.offsets)
            self.squared += float(np.square(rows, dtype=np.float64).sum())
            self.squared_error += coded.squared_error
            yield coded.codes.tobytes()

    def _scales(self) -> Iterator[Block]:
        yield from self._vectors(lambda: self.scales)

    def _offsets(self) -> Iterator[Block]:
        yield from self._vectors(lambda: self.offsets)

    def _vectors(self, kept: Callable[[], list[Bits16]]) -> Iterator[Block]:
        if not kept():
            for _ in self._codes():
                pass
        vectors = kept()
        for each in vectors:
            yield each.tobytes()
        vectors.clear()

    def _rows(self) -> Iterator[Floats]:
        """Whole blocks of rows, in float32; a matrix stored the other way round is turned at once."""
        columns = self.draft.shape[1]
        if self.is_turned:
            raw = b"".join(bytes(memoryview(block).cast("B")) for block in self.draft.blocks())
            whole = floats_of(raw, self.draft.dtype)
            yield from _cut(np.ascontiguousarray(whole.reshape(-1, columns).T))
            return
        rest = bytearray()
        whole_bytes = columns * LANES * DTYPE_BYTES[DTYPE_NAMES[self.draft.dtype]]
        for block in self.draft.blocks():
            rest += memoryview(block).cast("B")
            usable = len(rest) // whole_bytes * whole_bytes
            yield from _cut(floats_of(bytes(memoryview(rest)[:usable]), self.draft.dtype).reshape(-1, columns))
            del rest[:usable]
        if rest:
            yield floats_of(bytes(rest), self.draft.dtype).reshape(-1, columns)


def quantised(draft: Draft, wanted: QuantFormat) -> Draft:
    """Make a draft whose projections are coded in `wanted`, its tables in 8 bits; norms, biases and the rest stay.

    Raises UnsupportedCheckpoint for a model that only transformers can run.
    """
    spec = read_spec(json.loads(draft.files[CONFIG_NAME]))
    if spec.layout == "generic":
        raise UnsupportedCheckpoint(
            f"{spec.architecture} runs through transformers' own modules, which read no {wanted.name} weights; "
            "leave --quantize out",
            param="quantize",
        )
    formats = quantised_roles(spec, wanted)
    plain = {tensor.name: tensor for tensor in draft.tensors}
    places: dict[tuple[int | None, str], list[TensorSlot]] = {}
    for slot in tensor_slots(spec):
        places.setdefault((slot.layer, slot.role), []).append(slot)
    tensors: list[DraftTensor] = []
    matrices: list[_Matrix] = []
    for place, slots in places.items():
        if place not in formats:
            tensors += [plain[slot.name] for slot in slots]
            continue
        fused = [
            _Matrix(plain[slot.name], coded_shape(slot, spec), formats[place], is_turned(slot, spec)) for slot in slots
        ]
        parts = [matrix.tensors() for matrix in fused]
        tensors += [part[suffix] for suffix in parts[0] for part in parts]
        matrices += fused
    info = dataclasses.replace(draft.info, source=f"{wanted.name}:{draft.info.source}", quantization=wanted.name)

    def conclude() -> tuple[dict[str, bytes], CheckpointInfo]:
        return _concluded(matrices, dict(draft.files), info)

    return Draft(tuple(tensors), draft.files, info, conclude)


def _concluded(
    matrices: list[_Matrix], files: dict[str, bytes], info: CheckpointInfo
) -> tuple[dict[str, bytes], CheckpointInfo]:
    """What is known once every matrix has been coded: how much that lost, in all and one by one."""
    squared, squared_error = (sum(getattr(m, name) for m in matrices) for name in ("squared", "squared_error"))
    error = math.sqrt(squared_error / squared) if squared else 0.0
    report = {
        "format": info.quantization,
        "relative_error": error,
        "tensors": {m.draft.name: {"bits": m.wanted.bits, "relative_error": m.relative_error} for m in matrices},
    }
    return {**files, REPORT_NAME: to_json(report)}, dataclasses.replace(info, quantization_error=error)


def _cut(rows: Floats) -> Iterator[Floats]:
    """Cut rows so that a piece fits the cache; all but the last piece are whole blocks."""
    step = max(_VALUES_AT_ONCE // rows.shape[1] // LANES, 1) * LANES
    for first in range(0, len(rows), step):
        yield rows[first : first + step]

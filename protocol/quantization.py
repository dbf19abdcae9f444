"""How weights of 8 and 4 bits lie in a checkpoint: which matrices are quantised, and under which names and shapes.

Pure. A quantised matrix [rows, columns] is two or three ordinary tensors. Rows are taken by sixteen and columns by
groups, both padded to whole ones. With b = row // 16, i = row % 16 and g = column // group:
- `NAME` uint8 [blocks, bytes]: codes, laid out as the CPU kernels read them. Lane i of a run of columns is four bytes;
  at 8 bits it holds columns k, k+2, k+1, k+3 (one byte each, the value plus 128), at 4 bits columns k, k+2, k+4, k+6,
  k+1, k+3, k+5, k+7 (low nibble first). Bytes are [b][run][i].
- `NAME_scale`, and at 4 bits `NAME_offset`, bfloat16 [blocks, groups · 16], as [b][g][i]: a weight is
  scale · (code - 128) at 8 bits, scale · code + offset at 4.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nearline.protocol.decoder import DecoderSpec
from nearline.protocol.tensor_names import TensorSlot, tensor_slots

LANES = 16
"""Rows that lie side by side."""
SCALE, OFFSET = "_scale", "_offset"
_PROJECTIONS = ("qkv.weight", "o.weight", "gate_up.weight", "down.weight")
_ALWAYS_8 = ("embedding", "head", "down.weight")
"""Tables, whose loss is the largest per byte saved, and the projection of which the same is true."""


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One way to code weights: `bits` each, `group` neighbours of a row share a scale (and an offset)."""

    name: str
    bits: int
    group: int
    has_offsets: bool

    def num_blocks(self, rows: int) -> int:
        return -(-rows // LANES)

    def num_groups(self, columns: int) -> int:
        return -(-columns // self.group)

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the uint8 tensor that codes a matrix of this shape."""
        columns = self.num_groups(shape[1]) * self.group
        return self.num_blocks(shape[0]), columns * LANES * self.bits // 8

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the bfloat16 tensors of scales, and of offsets."""
        return self.num_blocks(shape[0]), self.num_groups(shape[1]) * LANES

    def names(self, names: Sequence[str]) -> list[str]:
        """Name all tensors that hold these matrices of one role, in the order in which they lie: codes adjacent, then
        scales, then offsets."""
        suffixes = ("", SCALE, OFFSET) if self.has_offsets else ("", SCALE)
        return [name + suffix for suffix in suffixes for name in names]


INT8 = QuantFormat("int8", 8, 64, has_offsets=False)
INT4 = QuantFormat("int4", 4, 32, has_offsets=True)
QUANT_FORMATS = {each.name: each for each in (INT8, INT4)}


def format_of(shape: tuple[int, ...], code_shape: tuple[int, ...]) -> QuantFormat | None:
    """Tell in which format a matrix of this shape is coded by the shape of its codes; None if in neither."""
    return next((each for each in QUANT_FORMATS.values() if each.code_shape(shape) == code_shape), None)


def is_turned(slot: TensorSlot, spec: DecoderSpec) -> bool:
    """Tell whether a matrix is stored [in, out] and coded the other way round: one row per output, always."""
    return spec.is_transposed and slot.role in _PROJECTIONS


def coded_shape(slot: TensorSlot, spec: DecoderSpec) -> tuple[int, ...]:
    """Shape of a matrix as it is coded."""
    return slot.shape[::-1] if is_turned(slot, spec) else slot.shape


def quantised_roles(spec: DecoderSpec, wanted: QuantFormat) -> dict[tuple[int | None, str], QuantFormat]:
    """Choose what to quantise: per (layer, role) the format of its matrices.

    Projections take `wanted`; embedding, output layer and `down` take 8 bits in both (see benchmarks/perplexity.py).
    Matrices that are fused must fill whole blocks of sixteen rows, or outputs would lie apart: others stay as they are.
    """
    slots = tensor_slots(spec)
    num_slots = Counter((slot.layer, slot.role) for slot in slots)
    chosen: dict[tuple[int | None, str], QuantFormat] = {}
    for slot in slots:
        if slot.role in _ALWAYS_8:
            chosen[slot.layer, slot.role] = INT8
        elif slot.role in _PROJECTIONS:
            chosen[slot.layer, slot.role] = wanted
    for slot in slots:
        place = slot.layer, slot.role
        holds_both = slot.role == "gate_up.weight" and spec.is_gated and num_slots[place] == 1
        if slot.role in ("qkv.weight", "gate_up.weight") and coded_shape(slot, spec)[0] % (LANES * (1 + holds_both)):
            chosen.pop(place, None)
    return chosen


def split_source(source: str) -> tuple[QuantFormat | None, str]:
    """Take a source apart that may ask for quantisation: `int4:hub:org/name` is `hub:org/name` in 4 bits."""
    name, _, rest = source.partition(":")
    wanted = QUANT_FORMATS.get(name)
    return (None, source) if wanted is None else (wanted, rest)

"""The weights of one adapter: taken over from its checkpoint in one piece, or made from tensors.

protocol/adapter_layout.py says how they lie there; nothing is done per projection until a step runs op by op. The table
of sites is numpy's: on so few numbers a call of torch takes several times as long, and a first request waits for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearline.engine.models.layers import Weights
from nearline.kernels import PackedAdapter
from nearline.protocol import Bytes, DecoderSpec, Digest
from nearline.protocol.adapter_layout import COLUMNS, MATRICES, PROJECTIONS, SITES, TABLES, VECTORS
from nearline.protocol.errors import AdapterMismatch, CheckpointCorrupt

Table = np.ndarray[Any, np.dtype[np.int64]]

_A, _B, _GAIN, _SHIFT, _RANK, _IN, _OUT = range(len(COLUMNS))


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """What one projection's output becomes: gain · y + shift + (x · aᵀ) · bᵀ, scaling and gain folded into b.

    Shapes: a [R, in], b [out, R]; gain, shift float32 [out]. Without a magnitude (DoRA) the gain is None, without a
    trained bias the shift is. The token embedding's a lies turned: [R, V] as a view of [V, R].
    """

    a_RM: Tensor
    b_NR: Tensor
    gain_N: Tensor | None = None
    shift_N: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.a_RM, self.b_NR, self.gain_N, self.shift_N


@dataclass(frozen=True, slots=True)
class TableChange:
    """What an adapter does to the token embedding or the head: `whole_VM` replaces the base's, `pair` adds to it."""

    pair: LoraWeights | None
    whole_VM: Tensor | None


class Adapter:
    """A loaded adapter. Owns: references to its memory, which comes back when nothing refers to it any more."""

    def __init__(
        self,
        digest: Digest,
        num_bytes: Bytes,
        packed: PackedAdapter | None,
        embedding: TableChange | None = None,
        head: TableChange | None = None,
    ) -> None:
        self.digest, self.num_bytes = digest, num_bytes
        self.packed, self.embedding, self.head = packed, embedding, head
        self._layers: list[dict[str, LoraWeights]] = []
        self._pack: _Pack | None = None

    @classmethod
    def of(cls, digest: Digest, layers: Sequence[Mapping[str, LoraWeights]]) -> "Adapter":
        """Make an adapter of tensors."""
        tensors = [{name: weights.tensors for name, weights in layer.items()} for layer in layers]
        num_bytes = sum(t.nbytes for layer in tensors for four in layer.values() for t in four if t is not None)
        adapter = cls(digest, num_bytes, PackedAdapter(tensors))
        adapter._layers = [dict(layer) for layer in layers]
        return adapter

    @property
    def layers(self) -> Sequence[Mapping[str, LoraWeights]]:
        """For each layer, the projections it changes ("q_proj" …), as tensors."""
        if not self._layers and self._pack is not None:
            self._layers = self._pack.layers()
        return self._layers


class _Pack:
    """The three flat tensors of a checkpoint, and what is where."""

    def __init__(self, weights: Weights, names: Sequence[str], device: torch.device) -> None:
        wanted = [name for name in (MATRICES, VECTORS, SITES) if name in names]
        weights.wait_for(wanted)
        self.sites: Table = weights.tensor(SITES).cpu().numpy()
        self.matrices = weights.tensor(MATRICES).to(device)
        self.vectors = weights.tensor(VECTORS).to(device) if VECTORS in names else self.matrices.new_empty(0).float()

    def check(self, spec: DecoderSpec) -> None:
        """Raise AdapterMismatch for sites the base does not have, CheckpointCorrupt for numbers that are not there."""
        sites = self.sites
        if sites.ndim != 2 or sites.shape[1] != len(COLUMNS) or sites.shape[0] < len(TABLES):
            raise CheckpointCorrupt(f"the adapter's table of sites is {list(sites.shape)}; import the adapter again")
        is_used = (sites[:, _RANK] > 0) | (sites[:, _GAIN : _SHIFT + 1] >= 0).any(axis=1)
        beyond = is_used[len(PROJECTIONS) * spec.num_layers : -len(TABLES)].nonzero()[0]
        if len(beyond):
            name = site_name(len(PROJECTIONS) * spec.num_layers + int(beyond[0]))
            raise AdapterMismatch(f"adapter changes {name!r}, which {spec.architecture} here does not have")
        shapes, table_shapes = _shapes(spec), _table_shapes(spec)
        here = sites[: -len(TABLES)][: len(shapes)]
        rows = np.concatenate([here, sites[-len(TABLES) :]])
        dims = np.concatenate([shapes[: len(here)], table_shapes])
        has_rank = rows[:, _RANK] > 0
        wrong = (has_rank & (rows[:, _IN : _OUT + 1] != dims).any(axis=1)).nonzero()[0]
        if len(wrong):
            row = int(wrong[0])
            name = site_name(row) if row < len(here) else TABLES[row - len(here)]
            raise AdapterMismatch(
                f"adapter's {name!r} maps {rows[row, _IN : _OUT + 1].tolist()} (inputs, outputs); the base needs "
                f"{dims[row].tolist()}: it was trained for another base"
            )
        self._check_bounds(rows, has_rank)

    def _check_bounds(self, sites: Table, has_rank: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        width = self.matrices.element_size()
        ends = sites[:, [_A, _B]] + sites[:, [_RANK]] * sites[:, [_IN, _OUT]] * width
        is_out = has_rank & ((ends > self.matrices.nbytes).any(axis=1) | (sites[:, [_A, _B]] < 0).any(axis=1))
        vector_ends = sites[:, [_GAIN, _SHIFT]] + 4 * sites[:, [_OUT]]
        is_out |= ((sites[:, [_GAIN, _SHIFT]] >= 0) & (vector_ends > self.vectors.nbytes)).any(axis=1)
        if bool(is_out.any()) or bool((sites[:, _RANK] < 0).any()):
            raise CheckpointCorrupt("the adapter's table of sites points outside its weights; import the adapter again")

    def packed(self, num_layers: int) -> PackedAdapter:
        """Say where everything is, for the compiled decoder."""
        sites = self.sites[: len(PROJECTIONS) * num_layers]
        table = np.zeros((len(PROJECTIONS) * num_layers, 5), dtype=np.int64)
        matrices, vectors = self.matrices.data_ptr(), self.vectors.data_ptr()
        bases = np.array([matrices, matrices, vectors, vectors])
        rows = sites[:, : _SHIFT + 1]
        table[: len(sites), :4] = np.where(rows >= 0, rows + bases, 0)
        table[: len(sites), 4] = sites[:, _RANK]
        return PackedAdapter.at(torch.from_numpy(table), (self.matrices, self.vectors))

    def layers(self) -> list[dict[str, LoraWeights]]:
        rows = self.sites[: -len(TABLES)].tolist()
        made: list[dict[str, LoraWeights]] = [{} for _ in range(len(rows) // len(PROJECTIONS))]
        for index, row in enumerate(rows):
            change = self.change(row)
            if change is not None:
                made[index // len(PROJECTIONS)][PROJECTIONS[index % len(PROJECTIONS)]] = change
        return made

    def change(self, row: Sequence[int], is_turned: bool = False) -> LoraWeights | None:
        """Views of one row's numbers; None where nothing is changed."""
        rank, num_in, num_out = row[_RANK], row[_IN], row[_OUT]
        gain, shift = (self._vector(row[column], num_out) for column in (_GAIN, _SHIFT))
        if not rank and gain is None and shift is None:
            return None
        a = self._matrix(row[_A], (num_in, rank) if is_turned else (rank, num_in))
        return LoraWeights(a.T if is_turned else a, self._matrix(row[_B], (rank, num_out)).T, gain, shift)

    def _matrix(self, offset: int, shape: tuple[int, int]) -> Tensor:
        count = shape[0] * shape[1]
        start = offset // self.matrices.element_size() if count else 0
        return self.matrices[start : start + count].view(shape)

    def _vector(self, offset: int, count: int) -> Tensor | None:
        return None if offset < 0 else self.vectors[offset // 4 : offset // 4 + count]


def read_adapter(
    digest: Digest, weights: Weights, names: Sequence[str], spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> Adapter:
    """Take over an adapter's checkpoint: no copy on a CPU whose compute dtype is the stored one.

    Raises AdapterMismatch for an adapter of another base or format, CheckpointCorrupt for torn numbers.
    """
    if SITES not in names or MATRICES not in names:
        raise AdapterMismatch(f"adapter {digest} was imported by an earlier version; import it again")
    pack = _Pack(weights, names, device)
    pack.check(spec)
    tables = [_table(pack, weights, names, spec, index) for index in range(len(TABLES))]
    tables = [None if table is None else _converted_table(table, dtype, device) for table in tables]
    num_bytes = pack.matrices.nbytes + pack.vectors.nbytes
    num_bytes += sum(t.whole_VM.nbytes for t in tables if t is not None and t.whole_VM is not None)
    if pack.matrices.dtype != dtype:
        layers = [{name: _converted(one, dtype) for name, one in layer.items()} for layer in pack.layers()]
        adapter = Adapter.of(digest, layers[: spec.num_layers])
        adapter.embedding, adapter.head = tables
        return adapter
    packed = pack.packed(spec.num_layers) if device.type == "cpu" else None
    adapter = Adapter(digest, num_bytes, packed, *tables)
    adapter._pack = pack
    return adapter


def site_name(row: int) -> str:
    """The name of the module that a row of SITES describes."""
    projection = PROJECTIONS[row % len(PROJECTIONS)]
    block = "mlp" if projection in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"model.layers.{row // len(PROJECTIONS)}.{block}.{projection}"


def _table(pack: _Pack, weights: Weights, names: Sequence[str], spec: DecoderSpec, index: int) -> TableChange | None:
    name = f"{TABLES[index]}.weight"
    whole = None
    if name in names:
        weights.wait_for([name])
        whole = weights.tensor(name)
        if tuple(whole.shape) != (spec.vocab_size, spec.model_dim):
            raise AdapterMismatch(
                f"adapter's {TABLES[index]!r} is {list(whole.shape)}; the base has {spec.vocab_size} tokens of "
                f"{spec.model_dim}"
            )
    pair = pack.change(pack.sites[index - len(TABLES)].tolist(), is_turned=index == 0)
    return None if pair is None and whole is None else TableChange(pair, whole)


def _converted(one: LoraWeights, dtype: torch.dtype) -> LoraWeights:
    return LoraWeights(one.a_RM.to(dtype), one.b_NR.T.to(dtype).contiguous().T, one.gain_N, one.shift_N)


def _converted_table(table: TableChange, dtype: torch.dtype, device: torch.device) -> TableChange:
    pair = None if table.pair is None else _converted(table.pair, dtype)
    return TableChange(pair, None if table.whole_VM is None else table.whole_VM.to(device, dtype))


@lru_cache(maxsize=1)
def _shapes(spec: DecoderSpec) -> Table:
    """Columns and rows of the projections an adapter may change, layer by layer in the order of PROJECTIONS."""
    q_dim, kv_dim, M, F = spec.query_dim, spec.kv_dim, spec.model_dim, spec.ffn_dim
    layer = [(M, q_dim), (M, kv_dim), (M, kv_dim), (q_dim, M), (M, F), (M, F), (F, M)]
    return np.array(layer * spec.num_layers, dtype=np.int64)


def _table_shapes(spec: DecoderSpec) -> Table:
    return np.array([(spec.vocab_size, spec.model_dim), (spec.model_dim, spec.vocab_size)], dtype=np.int64)

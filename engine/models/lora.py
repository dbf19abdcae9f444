"""Adapters in an engine: their weights by content digest, and how one step adds them to what the base computes.

A sequence names its adapter by digest and the step holds the weights themselves, so loading or unloading one
adapter can never change what another sequence computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nearline import kernels
from nearline.engine.models.adapter_weights import Adapter, LoraWeights, read_adapter
from nearline.kernels import LoraSegment
from nearline.loader import LoadedCheckpoint
from nearline.protocol import Bytes, DecoderSpec, Digest
from nearline.protocol.errors import ModelNotFound

__all__ = ["Adapter", "AdapterPool", "AdapterRun", "LoraPlan", "LoraWeights"]


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """Rows [start, end) of a step belong to sequences of this adapter."""

    digest: Digest
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Rows:
    adapter: Adapter
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Target:
    """Columns [start, end) of a (fused) projection's output, and who adds to them."""

    start: int
    end: int
    segments: list[LoraSegment]


class LoraPlan:
    """What the adapters of one step add. Rows without adapter are never touched.

    `packed` says it for the compiled decoder: (start, end, adapter) of each run of rows. What a layer run op by op
    needs is made when the layer first asks.
    """

    def __init__(self, spec: DecoderSpec, rows: Sequence[_Rows], is_merged: bool = False) -> None:
        """`is_merged`: the layers have the adapters in their weights; only the token embedding is changed here."""
        self._spec, self._rows = spec, rows
        self._layer_rows = () if is_merged else rows
        packed = [(run.start, run.end, run.adapter.packed) for run in self._layer_rows]
        self.packed = [(start, end, adapter) for start, end, adapter in packed if adapter is not None]
        self._targets: dict[tuple[int, str], list[_Target]] = {}

    def add_qkv_(self, layer: int, y_TN: Tensor, x_TM: Tensor) -> None:
        q, kv = self._spec.query_dim, self._spec.kv_dim
        self._add_(
            layer, "qkv", [("q_proj", 0, q), ("k_proj", q, q + kv), ("v_proj", q + kv, q + 2 * kv)], (y_TN, x_TM)
        )

    def add_o_(self, layer: int, y_TM: Tensor, x_TN: Tensor) -> None:
        self._add_(layer, "o", [("o_proj", 0, self._spec.model_dim)], (y_TM, x_TN))

    def add_gate_up_(self, layer: int, y_T2F: Tensor, x_TM: Tensor) -> None:
        F = self._spec.ffn_dim
        self._add_(layer, "gate_up", [("gate_proj", 0, F), ("up_proj", F, 2 * F)], (y_T2F, x_TM))

    def add_down_(self, layer: int, y_TM: Tensor, x_TF: Tensor) -> None:
        self._add_(layer, "down", [("down_proj", 0, self._spec.model_dim)], (y_TM, x_TF))

    def embed_(self, hidden_TM: Tensor, token_ids_T: Tensor) -> None:
        """Change what the base's token embedding gave, before any scale. Shapes: [T, M], [T]."""
        for run in self._rows:
            change = run.adapter.embedding
            if change is None:
                continue
            ids, rows = token_ids_T[run.start : run.end], slice(run.start, run.end)
            if change.whole_VM is not None:
                hidden_TM[rows] = F.embedding(ids, change.whole_VM)
            if change.pair is not None:
                # A row of a, found by its token, is what a product would have shrunk to: the same op adds it.
                shrunk_TR = F.embedding(ids, change.pair.a_RM.T)
                same_RR = torch.eye(shrunk_TR.shape[1], dtype=shrunk_TR.dtype, device=shrunk_TR.device)
                kernels.lora_add_(hidden_TM[rows], shrunk_TR, [LoraSegment(0, len(ids), same_RR, change.pair.b_NR)])

    def _add_(
        self, layer: int, what: str, columns: Sequence[tuple[str, int, int]], tensors: tuple[Tensor, Tensor]
    ) -> None:
        key = layer, what
        if key not in self._targets:
            self._targets[key] = _targets(self._layer_rows, layer, columns)
        y_TN, x_TM = tensors
        for target in self._targets[key]:
            kernels.lora_add_(y_TN[:, target.start : target.end], x_TM, target.segments)


class HeadPlan:
    """The heads of the adapters among the rows whose logits are computed."""

    def __init__(self, rows: Sequence[_Rows]) -> None:
        self._rows = rows

    def change_(self, logits_BV: Tensor, hidden_BM: Tensor) -> None:
        """Change the base's float32 logits in place, before any scale or cap. Shapes: [B, V], [B, M]."""
        segments = []
        for run in self._rows:
            change = run.adapter.head
            assert change is not None
            if change.whole_VM is not None:
                rows_BM = hidden_BM[run.start : run.end]
                logits_BV[run.start : run.end] = kernels.linear(rows_BM, change.whole_VM, out_dtype=logits_BV.dtype)
            if change.pair is not None:
                segments.append(LoraSegment(run.start, run.end, *change.pair.tensors))
        if segments:
            kernels.lora_add_(logits_BV, hidden_BM, segments)


class AdapterPool:
    """The adapters of one bound engine, by digest. Its memory grows with each adapter's own rank."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._dtype, self._device = spec, dtype, device
        self._adapters: dict[Digest, Adapter] = {}
        self._planned: tuple[tuple[AdapterRun, ...], bool] = ((), False)
        self._plan: LoraPlan | None = None

    def load(self, digest: Digest, weights: LoadedCheckpoint) -> Adapter:
        """Load an adapter from its checkpoint; a digest that is already there is returned as it is.

        Raises AdapterMismatch for sites or shapes that are not the base's, CheckpointCorrupt for torn files.
        """
        if digest in self._adapters:
            return self._adapters[digest]
        adapter = read_adapter(digest, weights, weights.names(), self._spec, self._dtype, self._device)
        self.add(adapter)
        return adapter

    def add(self, adapter: Adapter) -> None:
        """Make an adapter's weights usable under its digest."""
        self._adapters[adapter.digest] = adapter

    def get(self, digest: Digest) -> Adapter:
        """Raises ModelNotFound if the adapter is not loaded: the base never answers for it."""
        adapter = self._adapters.get(digest)
        if adapter is None:
            raise ModelNotFound(f"adapter {digest} is not loaded in this instance; send the request again")
        return adapter

    def unload(self, digest: Digest) -> None:
        """Free an adapter. Unknown digests are ignored."""
        self._adapters.pop(digest, None)
        self._planned, self._plan = ((), False), None

    def heads(self, digests: Sequence[Digest | None]) -> HeadPlan | None:
        """Plan the heads of rows of logits, each of its own adapter (None: the base); None if all are the base's."""
        here = list(self._adapters.values())  # in one go: the reader's thread adds others meanwhile
        if not any(adapter.head is not None for adapter in here):
            return None
        runs: list[_Rows] = []
        for row, digest in enumerate(digests):
            adapter = None if digest is None else self.get(digest)
            if adapter is None or adapter.head is None:
                continue
            if runs and runs[-1].adapter is adapter and runs[-1].end == row:
                runs[-1] = _Rows(adapter, runs[-1].start, row + 1)
            else:
                runs.append(_Rows(adapter, row, row + 1))
        return HeadPlan(runs) if runs else None

    def plan(self, runs: tuple[AdapterRun, ...], is_merged: bool = False) -> LoraPlan | None:
        """Plan the adapters of a step; None if it has none. Steady decoding repeats its rows and reuses the plan.

        Raises ModelNotFound if an adapter is not loaded.
        """
        if (runs, is_merged) != self._planned:
            rows = [_Rows(self.get(run.digest), run.start, run.end) for run in runs]
            self._planned = runs, is_merged
            self._plan = LoraPlan(self._spec, rows, is_merged) if runs else None
        return self._plan

    @property
    def digests(self) -> tuple[Digest, ...]:
        return tuple(self._adapters)

    @property
    def num_bytes(self) -> Bytes:
        return sum(adapter.num_bytes for adapter in list(self._adapters.values()))


def _targets(rows: Sequence[_Rows], layer: int, columns: Sequence[tuple[str, int, int]]) -> list[_Target]:
    targets = []
    for projection, start, end in columns:
        segments = []
        for run in rows:
            layers = run.adapter.layers
            pair = layers[layer].get(projection) if layer < len(layers) else None
            if pair is not None:
                segments.append(LoraSegment(run.start, run.end, *pair.tensors))
        if segments:
            targets.append(_Target(start, end, segments))
    return targets

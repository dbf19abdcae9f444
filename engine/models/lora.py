"""Adapters in an engine: their weights by content digest, and how one step adds them to the base's projections.

A sequence names its adapter by digest and the step holds the weights themselves, so loading or unloading one
adapter can never change what another sequence computes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nearline import kernels
from nearline.engine.models.layers import Weights
from nearline.kernels import LoraSegment, PackedAdapter
from nearline.protocol import Bytes, DecoderSpec, Digest
from nearline.protocol.errors import AdapterMismatch, ModelNotFound

ADAPTER_NAME = "adapter.json"
_LAYER = "model.layers."


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """What one projection's output becomes: gain · y + shift + (x · aᵀ) · bᵀ, scaling and gain folded into b.

    Shapes: a [R, in], b [out, R]; gain, shift float32 [out]. Without a magnitude (DoRA) the gain is None, without a
    trained bias the shift is.
    """

    a_RM: Tensor
    b_NR: Tensor
    gain_N: Tensor | None = None
    shift_N: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.a_RM, self.b_NR, self.gain_N, self.shift_N


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter: for each layer, the projections it changes ("q_proj" …)."""

    digest: Digest
    layers: tuple[dict[str, LoraWeights], ...]
    packed: PackedAdapter
    num_bytes: Bytes

    @classmethod
    def of(cls, digest: Digest, layers: Sequence[dict[str, LoraWeights]]) -> "Adapter":
        tensors = [{name: weights.tensors for name, weights in layer.items()} for layer in layers]
        num_bytes = sum(t.nbytes for layer in tensors for four in layer.values() for t in four if t is not None)
        return cls(digest, tuple(layers), PackedAdapter(tensors), num_bytes)


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
    """What the adapters of one step add, per layer and fused projection. Rows without adapter are never touched.

    `packed` says the same for the compiled decoder: (start, end, adapter) of each run of rows.
    """

    def __init__(self, spec: DecoderSpec, rows: Sequence[_Rows]) -> None:
        self.packed = [(run.start, run.end, run.adapter.packed) for run in rows]
        q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        ends = [("q_proj", 0, q_dim), ("k_proj", q_dim, q_dim + kv_dim), ("v_proj", q_dim + kv_dim, q_dim + 2 * kv_dim)]
        halves = [("gate_proj", 0, spec.ffn_dim), ("up_proj", spec.ffn_dim, 2 * spec.ffn_dim)]
        whole = spec.model_dim
        layers = range(spec.num_layers)
        self._qkv = [_targets(rows, i, ends) for i in layers]
        self._o = [_targets(rows, i, [("o_proj", 0, whole)]) for i in layers]
        self._gate_up = [_targets(rows, i, halves) for i in layers]
        self._down = [_targets(rows, i, [("down_proj", 0, whole)]) for i in layers]

    def add_qkv_(self, layer: int, y_TN: Tensor, x_TM: Tensor) -> None:
        _add_(self._qkv[layer], y_TN, x_TM)

    def add_o_(self, layer: int, y_TM: Tensor, x_TN: Tensor) -> None:
        _add_(self._o[layer], y_TM, x_TN)

    def add_gate_up_(self, layer: int, y_T2F: Tensor, x_TM: Tensor) -> None:
        _add_(self._gate_up[layer], y_T2F, x_TM)

    def add_down_(self, layer: int, y_TM: Tensor, x_TF: Tensor) -> None:
        _add_(self._down[layer], y_TM, x_TF)


class AdapterPool:
    """The adapters of one bound engine, by digest. Its memory grows with each adapter's own rank."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._dtype, self._device = spec, dtype, device
        self._adapters: dict[Digest, Adapter] = {}
        self._planned_runs: tuple[AdapterRun, ...] = ()
        self._plan: LoraPlan | None = None

    def load(self, digest: Digest, weights: Weights, directory: Path) -> Adapter:
        """Load an adapter from its checkpoint; a digest that is already there is returned as it is.

        Raises AdapterMismatch for modules or shapes that are not the base's, CheckpointCorrupt for torn files.
        """
        if digest in self._adapters:
            return self._adapters[digest]
        layers: list[dict[str, LoraWeights]] = [{} for _ in range(self._spec.num_layers)]
        for module, change in _changes(directory / ADAPTER_NAME).items():
            layer, projection = self._place(module)
            layers[layer][projection] = self._read(module, weights, change)
        adapter = Adapter.of(digest, layers)
        self.add(adapter)
        return adapter

    def add(self, adapter: Adapter) -> None:
        """Make an adapter's weights usable under its digest."""
        self._adapters[adapter.digest] = adapter

    def unload(self, digest: Digest) -> None:
        """Free an adapter. Unknown digests are ignored."""
        self._adapters.pop(digest, None)
        self._planned_runs, self._plan = (), None

    def plan(self, runs: tuple[AdapterRun, ...]) -> LoraPlan | None:
        """Plan the adapters of a step; None if it has none. Steady decoding repeats its rows and reuses the plan.

        Raises ModelNotFound if an adapter is not loaded: the base never answers for it.
        """
        if runs != self._planned_runs:
            rows = [_Rows(self._loaded(run.digest), run.start, run.end) for run in runs]
            self._planned_runs, self._plan = runs, LoraPlan(self._spec, rows) if runs else None
        return self._plan

    @property
    def digests(self) -> tuple[Digest, ...]:
        return tuple(self._adapters)

    @property
    def num_bytes(self) -> Bytes:
        return sum(adapter.num_bytes for adapter in self._adapters.values())

    def _loaded(self, digest: Digest) -> Adapter:
        adapter = self._adapters.get(digest)
        if adapter is None:
            raise ModelNotFound(f"adapter {digest} is not loaded in this instance; send the request again")
        return adapter

    def _place(self, module: str) -> tuple[int, str]:
        """Split `model.layers.7.self_attn.q_proj` into layer and projection."""
        index, _, rest = module.removeprefix(_LAYER).partition(".")
        projection = rest.rpartition(".")[2]
        is_known = module.startswith(_LAYER) and index.isdigit() and projection in _shapes(self._spec)
        if not is_known or int(index) >= self._spec.num_layers:
            raise AdapterMismatch(f"adapter changes {module!r}, which {self._spec.architecture} here does not have")
        return int(index), projection

    def _read(self, module: str, weights: Weights, change: "_Change") -> LoraWeights:
        num_out, num_in = _shapes(self._spec)[module.rpartition(".")[2]]
        gain_N, shift_N = (self._vector(f"{module}.{what}", weights, num_out, change) for what in ("gain", "shift"))
        if not change.rank:
            empty = torch.empty(0, dtype=self._dtype, device=self._device)
            return LoraWeights(empty.view(0, num_in), empty.view(num_out, 0), gain_N, shift_N)
        names = [f"{module}.lora_A", f"{module}.lora_B"]
        weights.wait_for(names)
        a, b = (weights.tensor(name) for name in names)
        if a.shape[1] != num_in or b.shape[0] != num_out or a.shape[0] != b.shape[1]:
            raise AdapterMismatch(
                f"adapter's {module!r} has A {list(a.shape)} and B {list(b.shape)}; the base needs "
                f"[rank, {num_in}] and [{num_out}, rank]: it was trained for another base"
            )
        # Private copies even when dtypes agree: an adapter's memory must not hang on its mapped file. b lies in memory
        # as [R, out], which the kernels read row by row.
        scaled_NR = b.to(self._device, torch.float32) * change.scaling
        if gain_N is not None:
            scaled_NR *= gain_N[:, None]
        scaled_RN = scaled_NR.to(self._dtype).T.contiguous()
        return LoraWeights(a.to(self._device, self._dtype, copy=True), scaled_RN.T, gain_N, shift_N)

    def _vector(self, name: str, weights: Weights, num_outputs: int, change: "_Change") -> Tensor | None:
        if name.rpartition(".")[2] not in change.vectors:
            return None
        weights.wait_for([name])
        vector = weights.tensor(name)
        if vector.shape != (num_outputs,):
            raise AdapterMismatch(f"adapter's {name!r} is {list(vector.shape)}; the base needs [{num_outputs}]")
        return vector.to(self._device, torch.float32, copy=True)


@dataclass(frozen=True, slots=True)
class _Change:
    """What adapter.json says of one module: rank 0 has no A and B; `vectors` are of "gain" and "shift"."""

    rank: int
    scaling: float
    vectors: tuple[str, ...]


def _changes(path: Path) -> dict[str, _Change]:
    try:
        modules = json.loads(path.read_text())["modules"]
        return {
            name: _Change(int(entry["rank"]), float(entry["scaling"]), tuple(entry.get("changes", ())))
            for name, entry in modules.items()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterMismatch(f"{path}: no valid adapter description ({error}); import the adapter again") from None


def _shapes(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Rows and columns of every projection an adapter may change."""
    q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    M, F = spec.model_dim, spec.ffn_dim
    return {
        "q_proj": (q_dim, M), "k_proj": (kv_dim, M), "v_proj": (kv_dim, M), "o_proj": (M, q_dim),
        "gate_proj": (F, M), "up_proj": (F, M), "down_proj": (M, F),
    }  # fmt: skip


def _targets(rows: Sequence[_Rows], layer: int, columns: Sequence[tuple[str, int, int]]) -> list[_Target]:
    targets = []
    for projection, start, end in columns:
        segments = []
        for run in rows:
            pair = run.adapter.layers[layer].get(projection)
            if pair is not None:
                segments.append(LoraSegment(run.start, run.end, *pair.tensors))
        if segments:
            targets.append(_Target(start, end, segments))
    return targets


def _add_(targets: Sequence[_Target], y_TN: Tensor, x_TM: Tensor) -> None:
    for target in targets:
        kernels.lora_add_(y_TN[:, target.start : target.end], x_TM, target.segments)

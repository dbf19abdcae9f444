"""A checkpoint's bytes on a device, seen as named tensors."""

import itertools
import math
from collections.abc import Sequence

import torch

from nearline.checkpoint_store import Manifest, TensorEntry
from nearline.loader.dtypes import torch_dtype
from nearline.loader.ready import Arrival
from nearline.protocol.errors import CheckpointCorrupt


class LoadedCheckpoint:
    """Named views of one byte range that holds the weights file. Bytes may still be arriving: `wait_for` first.

    Owns: the range lives as long as this object or any tensor taken from it, so a tensor is never a dangling pointer;
    but after `close` the node agent may put other bytes under it, so drop tensors before closing.
    """

    def __init__(self, manifest: Manifest, data: torch.Tensor, arrival: Arrival) -> None:
        """`data` is the weights file as uint8, at least `manifest.num_bytes` long, on the device."""
        self.manifest = manifest
        self.device = data.device
        self._data: torch.Tensor | None = data
        self._arrival = arrival
        self._entries = {entry.name: entry for entry in manifest.tensors}
        self._copies: dict[tuple[str, ...], torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}

    @property
    def is_copied(self) -> bool:
        """Whether the device has memory of its own; on a CPU tensors are the pool's frames themselves."""
        return self.device.type != "cpu"

    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in the order of their bytes."""
        return tuple(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as a view, without waiting for its bytes.

        One that does not lie on a multiple of its item size is copied, after waiting. Raises CheckpointCorrupt if the
        checkpoint has no such tensor.
        """
        if name not in self._views:
            self._views[name] = self._view([self._entry(name)])
        return self._views[name]

    def fused(self, names: Sequence[str]) -> torch.Tensor:
        """Concatenate tensors along dim 0: a view, without waiting, when they are adjacent; else a copy, after waiting.

        Raises CheckpointCorrupt if one is missing or they differ in dtype or in another dim.
        """
        entries = [self._entry(name) for name in names]
        first = entries[0]
        for entry in entries[1:]:
            if entry.dtype != first.dtype or entry.shape[1:] != first.shape[1:] or not entry.shape:
                raise CheckpointCorrupt(
                    f"tensors {first.name} {first.dtype}{list(first.shape)} and {entry.name} "
                    f"{entry.dtype}{list(entry.shape)} cannot be fused along dim 0"
                )
        if all(a.offset + a.num_bytes == b.offset for a, b in itertools.pairwise(entries)):
            return self._view(entries)
        key = tuple(names)
        if key not in self._copies:
            self.wait_for(names)
            self._copies[key] = torch.cat([self._view([entry]) for entry in entries])
        return self._copies[key]

    def wait_for(self, names: Sequence[str]) -> None:
        """Block until the bytes of these tensors may be used on the device.

        On CUDA the host waits until the copies are queued, the current stream until they are done. Raises
        CheckpointCorrupt if a chunk failed, InstanceFailed if the reader has stopped.
        """
        size = self.manifest.chunk_bytes
        for name in names:
            entry = self._entry(name)
            if entry.num_bytes:
                self._arrival.wait(entry.offset // size, (entry.offset + entry.num_bytes - 1) // size)

    def is_complete(self) -> bool:
        """True when every byte is on the device (CUDA: every copy has ended).

        A stream that has failed raises why (CheckpointCorrupt, InstanceFailed): nobody else would say so.
        """
        return self._arrival.is_complete()

    def close(self) -> None:
        """Stop following the reader and drop this object's hold on the bytes. Idempotent.

        After it returns nothing reads the frames on our behalf; tensors that still live keep the range mapped.
        """
        self._arrival.close()
        self._copies.clear()
        self._views.clear()
        self._data = None

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            known = f"{len(self._entries)} tensors, the first {next(iter(self._entries), None)!r}"
            raise CheckpointCorrupt(f"checkpoint {self.manifest.digest} has no tensor {name!r} (it has {known})")
        return entry

    def _view(self, entries: list[TensorEntry]) -> torch.Tensor:
        if self._data is None:
            raise RuntimeError(f"checkpoint {self.manifest.digest} is closed")
        first = entries[0]
        dtype = torch_dtype(first.dtype, first.name)
        shape = (sum(e.shape[0] for e in entries), *first.shape[1:]) if len(entries) > 1 else first.shape
        num_bytes = sum(e.num_bytes for e in entries)
        if math.prod(shape) * dtype.itemsize != num_bytes:
            raise CheckpointCorrupt(
                f"tensor {first.name}: {first.dtype}{list(shape)} needs {math.prod(shape) * dtype.itemsize} bytes, the "
                f"manifest of {self.manifest.digest} gives it {num_bytes}"
            )
        if first.offset + num_bytes > self.manifest.num_bytes:
            raise CheckpointCorrupt(
                f"tensor {first.name} ends at byte {first.offset + num_bytes}, checkpoint {self.manifest.digest} has "
                f"{self.manifest.num_bytes}"
            )
        if not num_bytes:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if first.offset % dtype.itemsize == 0:
            return self._data[first.offset : first.offset + num_bytes].view(dtype).view(shape)
        key = tuple(e.name for e in entries)
        if key not in self._copies:
            self.wait_for(key)
            raw = self._data[first.offset : first.offset + num_bytes].clone()
            self._copies[key] = raw.view(dtype).view(shape)
        return self._copies[key]

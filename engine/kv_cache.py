"""The tensors that keep keys and values, cut into blocks, on the device and beside it; how many a budget buys."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from nearline.engine.swap import BlockMove
from nearline.protocol import Bytes, DecoderSpec
from nearline.protocol.errors import OutOfMemory

DEFAULT_BLOCK_SIZE = 16


def block_bytes(spec: DecoderSpec, block_size: int, dtype: torch.dtype) -> Bytes:
    """Bytes that one block of `block_size` positions takes over all layers."""
    return spec.kv_values_per_token * block_size * dtype.itemsize


class KVCache:
    """Per layer one tensor of keys and one of values, [N, K, P, D]; a block id means the same block in every layer.

    Owns: its memory, until the last reference goes. On a CPU, pages are zero and get backed when first written.
    """

    def __init__(
        self, spec: DecoderSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (spec.num_layers, 2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self.store = _zeros(shape, dtype, device)
        self.layers: list[tuple[Tensor, Tensor]] = [(pair[0], pair[1]) for pair in self.store.unbind(0)]

    @classmethod
    def within(
        cls, spec: DecoderSpec, kv_bytes: Bytes, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        """Make the largest cache that fits `kv_bytes`. Raises OutOfMemory if not even one block does."""
        each = block_bytes(spec, block_size, dtype)
        if kv_bytes < each:
            raise OutOfMemory(
                f"KV cache of {kv_bytes} bytes holds no block: {block_size} tokens of {spec.architecture} take "
                f"{each} bytes; raise kv_bytes"
            )
        # No sequence needs positions beyond the context, but several sequences may be long: the budget decides.
        return cls(spec, kv_bytes // each, block_size, dtype, device)

    @property
    def block_bytes(self) -> Bytes:
        """Bytes of one block over all layers."""
        return self.store[:, :, 0].numel() * self.store.element_size()

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def fill(self, blocks: Sequence[int], value: float) -> None:
        """Write a value everywhere in some blocks."""
        self.store[:, :, list(blocks)] = value

    def copy_blocks(self, copies: Sequence[BlockMove]) -> None:
        """Copy whole blocks (source, destination) in every layer, as if all at once."""
        if copies:
            sources, destinations = zip(*copies, strict=True)
            self.store[:, :, list(destinations)] = self.store[:, :, list(sources)]


class HostStore:
    """Blocks in the host's memory, where KV waits for its sequence to run again. Owns its memory, taken at first use.

    On a CUDA device it is pinned, so that copies run at the link's full speed.
    """

    def __init__(self, cache: KVCache, host_bytes: Bytes) -> None:
        self._cache = cache
        self.num_blocks = host_bytes // cache.block_bytes
        self._blocks: Tensor | None = None

    def save(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks (device, host) out of the cache."""
        if moves:
            devices, hosts = zip(*moves, strict=True)
            self._host()[:, :, list(hosts)] = self._cache.store[:, :, list(devices)].to("cpu")

    def restore(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks (host, device) back into the cache."""
        if moves:
            hosts, devices = zip(*moves, strict=True)
            self._cache.store[:, :, list(devices)] = self._host()[:, :, list(hosts)].to(self._cache.store.device)

    def _host(self) -> Tensor:
        if self._blocks is None:
            shape = list(self._cache.store.shape)
            shape[2] = self.num_blocks
            dtype, device = self._cache.store.dtype, self._cache.store.device
            is_cpu = device.type == "cpu"
            self._blocks = (
                _zeros(tuple(shape), dtype, device) if is_cpu else torch.zeros(shape, dtype=dtype, pin_memory=True)
            )
        return self._blocks


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Untouched pages, where torch would write zeros: touching gigabytes would make a bind take seconds. Small pages:
    # the first block touches every layer's keys and values, and 2 MiB zeroed for each costs more than a prefill.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    with contextlib.suppress(OSError):  # only advice: kernels built without it refuse
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

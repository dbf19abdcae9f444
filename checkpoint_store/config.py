"""Settings of one node's store, and how their automatic values follow from the machine. Pure."""

from dataclasses import dataclass
from pathlib import Path

from nearline.checkpoint_store.types import CHUNK_BYTES, DATA_ALIGNMENT
from nearline.protocol import Bytes

_RAM_SHARE = 0.25
_AVAILABLE_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    """Where a node keeps checkpoints and how much memory and disk they may take."""

    root: Path
    """Directory of the store; created when absent. One process at a time may own it."""
    dram_pool_bytes: Bytes | None = None
    """Size of the DRAM pool; None: see `resolve_pool_frames`."""
    memory_bytes: Bytes | None = None
    """Memory this process may use, limits of its container included; None: the machine's."""
    frame_bytes: Bytes = CHUNK_BYTES
    """Size of a pool frame: a multiple of 4096, at least the chunk size of every checkpoint that is loaded."""
    touch_ahead_bytes: Bytes = 1024**3
    """How much unused pool memory is kept touched (so allocated) ahead of need; 0 touches nothing early."""
    ssd_budget_bytes: Bytes | None = None
    """Most bytes that checkpoints may take under `root`; None: what the disk has."""
    max_readers: int = 8
    """Most threads that read from disk at once; how many are used follows the measured bandwidth."""

    def __post_init__(self) -> None:
        if self.frame_bytes <= 0 or self.frame_bytes % DATA_ALIGNMENT:
            raise ValueError(f"frame_bytes is {self.frame_bytes}; it must be a positive multiple of {DATA_ALIGNMENT}")
        if self.max_readers < 1:
            raise ValueError(f"max_readers is {self.max_readers}; it must be at least 1")


def resolve_pool_frames(config: StoreConfig, ram_bytes: Bytes, available_bytes: Bytes) -> int:
    """Return the number of frames of the pool: as configured, else the lesser of 25 % of RAM and 50 % of what is
    available now. At least one frame."""
    if config.memory_bytes is not None:
        ram_bytes = min(ram_bytes, config.memory_bytes)
        available_bytes = min(available_bytes, config.memory_bytes)
    wanted = config.dram_pool_bytes
    if wanted is None:
        wanted = int(min(_RAM_SHARE * ram_bytes, _AVAILABLE_SHARE * available_bytes))
    return max(1, wanted // config.frame_bytes)

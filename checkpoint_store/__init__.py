"""Bytes: the checkpoint format, import from elsewhere, and the tiers that checkpoints move through.

The store itself is loaded when first named: the loader needs only the words here, in an engine process that has neither
the store's threads nor its libraries.
"""

from typing import TYPE_CHECKING, Any

from nearline.checkpoint_store import futex
from nearline.checkpoint_store.config import StoreConfig, resolve_pool_frames
from nearline.checkpoint_store.estimate import Bandwidths
from nearline.checkpoint_store.lease import Lease, ReadStats
from nearline.checkpoint_store.ssd import Room
from nearline.checkpoint_store.tiers import Admission, ChunkState, DramTier, Eviction
from nearline.checkpoint_store.types import (
    CHUNK_BYTES,
    DATA_ALIGNMENT,
    FORMAT_VERSION,
    FRAME_FAILED,
    FRAME_READING,
    FRAME_READY,
    MANIFEST_NAME,
    WEIGHTS_NAME,
    Manifest,
    TensorEntry,
    read_manifest,
    write_manifest,
)
from nearline.checkpoint_store.weights_file import WeightsFile, check_digest

if TYPE_CHECKING:
    from nearline.checkpoint_store.store import CheckpointStore

__all__ = [
    "CHUNK_BYTES",
    "DATA_ALIGNMENT",
    "FORMAT_VERSION",
    "FRAME_FAILED",
    "FRAME_READING",
    "FRAME_READY",
    "MANIFEST_NAME",
    "WEIGHTS_NAME",
    "Admission",
    "Bandwidths",
    "CheckpointStore",
    "ChunkState",
    "DramTier",
    "Eviction",
    "Lease",
    "Manifest",
    "ReadStats",
    "Room",
    "StoreConfig",
    "TensorEntry",
    "WeightsFile",
    "check_digest",
    "futex",
    "read_manifest",
    "resolve_pool_frames",
    "write_manifest",
]


def __getattr__(name: str) -> Any:
    if name == "CheckpointStore":
        from nearline.checkpoint_store.store import CheckpointStore

        return CheckpointStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

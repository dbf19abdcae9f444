"""Bytes: the checkpoint format, import from elsewhere, and the tiers that checkpoints move through."""

from nearline.checkpoint_store.config import StoreConfig, resolve_pool_frames
from nearline.checkpoint_store.estimate import Bandwidths, load_s
from nearline.checkpoint_store.lease import Lease, ReadStats
from nearline.checkpoint_store.pool import FRAME_FAILED, FRAME_READING, FRAME_READY
from nearline.checkpoint_store.reader import check_digest
from nearline.checkpoint_store.store import CheckpointStore
from nearline.checkpoint_store.tiers import Admission, ChunkState, DramTier, Eviction
from nearline.checkpoint_store.types import (
    CHUNK_BYTES,
    DATA_ALIGNMENT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    WEIGHTS_NAME,
    Manifest,
    TensorEntry,
    read_manifest,
    write_manifest,
)

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
    "StoreConfig",
    "TensorEntry",
    "check_digest",
    "load_s",
    "read_manifest",
    "resolve_pool_frames",
    "write_manifest",
]

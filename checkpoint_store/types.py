"""What a checkpoint on disk consists of, and the manifest that describes it."""

import json
from dataclasses import dataclass
from pathlib import Path

from nearline.protocol import Bytes, CheckpointInfo, Digest, from_plain, to_plain
from nearline.protocol.errors import CheckpointCorrupt

FORMAT_VERSION = 1
CHUNK_BYTES: Bytes = 16 * 1024 * 1024
"""Unit of I/O, residency, verification and eviction."""
DATA_ALIGNMENT: Bytes = 4096
"""The safetensors header is padded so that tensor data starts on this boundary (direct I/O, page mapping)."""
WEIGHTS_NAME = "model.safetensors"
MANIFEST_NAME = "manifest.json"
FRAME_READING, FRAME_READY, FRAME_FAILED = 0, 1, 2
"""Ready byte of a pool frame: empty or still being read, valid, never going to be valid."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. `offset` counts from the start of the file; `dtype` is safetensors' name (BF16, F32 …)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: Bytes
    num_bytes: Bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed checkpoint directory: `WEIGHTS_NAME` of `num_bytes`, cut into chunks of `chunk_bytes` (the last
    one may be short), each with its xxh3-128. Chunk i covers file bytes [i·chunk_bytes, (i+1)·chunk_bytes)."""

    format_version: int
    info: CheckpointInfo
    num_bytes: Bytes
    chunk_bytes: Bytes
    chunk_digests: tuple[str, ...]
    tensors: tuple[TensorEntry, ...]

    @property
    def digest(self) -> Digest:
        return self.info.digest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json`: the commit marker, so the caller writes it last and syncs the directory after."""
    (directory / MANIFEST_NAME).write_text(json.dumps(to_plain(manifest), indent=1))


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises CheckpointCorrupt if it is absent, torn or of another version."""
    path = directory / MANIFEST_NAME
    try:
        plain = json.loads(path.read_text())
        manifest = from_plain(Manifest, plain)
    except (OSError, ValueError) as error:
        raise CheckpointCorrupt(f"{path}: no valid manifest ({error}); remove the directory and import again") from None
    if manifest.format_version != FORMAT_VERSION:
        raise CheckpointCorrupt(f"{path}: format {manifest.format_version}, this version reads {FORMAT_VERSION}")
    num_chunks = -(-manifest.num_bytes // manifest.chunk_bytes) if manifest.chunk_bytes > 0 else 0
    if not num_chunks or num_chunks != len(manifest.chunk_digests):
        raise CheckpointCorrupt(
            f"{path}: {manifest.num_bytes} bytes in chunks of {manifest.chunk_bytes} do not make "
            f"{len(manifest.chunk_digests)} digests; remove the directory and import again"
        )
    return manifest

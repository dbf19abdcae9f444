"""The name of a checkpoint: a digest of its content; and the check of a committed directory against its name."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import xxhash

from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.marker import clear_damage
from nearline.checkpoint_store.types import MANIFEST_NAME, WEIGHTS_NAME, Manifest, read_manifest
from nearline.checkpoint_store.verify import verify_weights
from nearline.protocol import Bytes, Digest
from nearline.protocol.errors import CheckpointCorrupt


def content_digest(chunk_digests: Iterable[str], files: Mapping[str, bytes], base_digest: str = "") -> Digest:
    """Name a checkpoint by its content: chunk digests, small files, and (for an adapter) the base it was made for."""
    hasher = xxhash.xxh3_128()
    parts: list[bytes] = [base_digest.encode(), "".join(chunk_digests).encode()]
    for name in sorted(files):
        parts += [name.encode(), files[name]]
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return Digest(hasher.hexdigest())


def verify_checkpoint(directory: Path, reporter: Reporter) -> Manifest:
    """Check a committed checkpoint against its name: every chunk, every small file; whole, it may be loaded.

    Raises CheckpointCorrupt.
    """
    manifest = read_manifest(directory)
    verify_files(directory, manifest)
    verify_weights(directory / WEIGHTS_NAME, manifest, verifying(reporter))
    clear_damage(directory)
    return manifest


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Check the manifest and the small files on disk against the checkpoint's name, and against `manifest`, which is
    what the reader of this directory goes by. Raises CheckpointCorrupt."""
    if read_manifest(directory) != manifest:
        raise CheckpointCorrupt(f"{directory / MANIFEST_NAME}: it was changed; import the checkpoint again")
    files = {name: _read(directory / name) for name in manifest.info.files}
    found = content_digest(manifest.chunk_digests, files, manifest.info.base_digest or "")
    if not found == manifest.digest == directory.name:
        raise CheckpointCorrupt(
            f"{directory}: its content has digest {found}, its manifest says {manifest.digest}; a file was changed, "
            "import the checkpoint again"
        )


def verifying(reporter: Reporter) -> Callable[[Bytes, Bytes], None]:
    """Report the progress of a verification."""
    return lambda done_bytes, total_bytes: reporter.progress("verifying", done_bytes, total_bytes)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointCorrupt(f"{path}: {error.strerror}; import the checkpoint again") from None

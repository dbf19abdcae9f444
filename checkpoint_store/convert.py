"""One import, from a source somebody names to a committed checkpoint."""

from pathlib import Path

from nearline.checkpoint_store.adapter import draft_adapter
from nearline.checkpoint_store.convert_model import draft_model
from nearline.checkpoint_store.convert_types import Draft, Reporter
from nearline.checkpoint_store.peers import copy_from_peers
from nearline.checkpoint_store.publish import publish
from nearline.checkpoint_store.publish_linked import publish_linked
from nearline.checkpoint_store.quantize import quantised
from nearline.checkpoint_store.source import locate, located
from nearline.checkpoint_store.source_directory import SourceDirectory
from nearline.checkpoint_store.types import Manifest
from nearline.protocol import PEER, CheckpointKind, Digest, split_source
from nearline.protocol.errors import AdapterMismatch, InvalidRequest, UnsupportedCheckpoint

AS_IS = "as-is:"
"""Before a directory: its safetensors file is served as it is, by a hard link, and not converted."""


def import_checkpoint(
    root: Path, kind: CheckpointKind, source: str, base_digest: Digest | None = None, reporter: Reporter | None = None
) -> Manifest:
    """Bring `source` under `root/checkpoints`. An adapter is checked against the base it names.

    `int8:` or `int4:` before a model's source quantises it. Raises NearlineError saying what is wrong with the source;
    nothing of a failed import stays.
    """
    reporter = reporter or Reporter()
    if source.startswith(PEER):
        return copy_from_peers(root, source, reporter)
    wanted, source = split_source(source)
    if wanted is not None and (kind is not CheckpointKind.MODEL or source.startswith(AS_IS)):
        what = "an adapter" if kind is not CheckpointKind.MODEL else "a model served as it is"
        raise InvalidRequest(f"{what} cannot be quantised; leave --quantize {wanted.name} out", param="quantize")
    if source.startswith(AS_IS):
        return _import_as_is(root, kind, source, reporter)
    with located(source, root, reporter) as path:
        reporter.progress("reading", 0, 0)
        draft = _draft(path, (kind, source, base_digest), root, reporter)
        return publish(root, draft if wanted is None else quantised(draft, wanted), reporter)


def _import_as_is(root: Path, kind: CheckpointKind, source: str, reporter: Reporter) -> Manifest:
    place = source.removeprefix(AS_IS)
    if place.startswith(("hub:", "http://", "https://")):
        raise UnsupportedCheckpoint(f"{place}: only a local directory can be served as it is; leave --no-convert out")
    path = locate(place)
    if kind is not CheckpointKind.MODEL or not path.is_dir():
        raise UnsupportedCheckpoint(f"{path}: only a model's safetensors directory can be served as it is")
    reporter.progress("reading", 0, 0)
    directory = SourceDirectory(path)
    return publish_linked(root, directory, draft_model(directory, source, reporter), reporter)


def _draft(path: Path, wish: tuple[CheckpointKind, str, Digest | None], root: Path, reporter: Reporter) -> Draft:
    kind, source, base_digest = wish
    if kind is CheckpointKind.MODEL:
        return _draft_model(path, source, reporter)
    if base_digest is None:
        raise AdapterMismatch("an adapter needs the model it was made for; name its base", param="base")
    if path.is_file():
        raise UnsupportedCheckpoint(f"{path}: adapters come as PEFT directories, not as GGUF files")
    return draft_adapter(SourceDirectory(path), source, root, base_digest, reporter)


def _draft_model(path: Path, source: str, reporter: Reporter) -> Draft:
    if path.is_dir():
        return draft_model(SourceDirectory(path), source, reporter)
    # `gguf` and `tokenizers` are not needed for directories, nor installed on a bare GPU box.
    from nearline.checkpoint_store.gguf_model import draft_gguf

    return draft_gguf(path, source, reporter)

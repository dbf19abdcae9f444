"""The weights of a Hugging Face directory: one safetensors file, or shards that an index names."""

from typing import Any

from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.safetensors_file import StoredTensor, open_safetensors
from nearline.checkpoint_store.source_directory import SourceDirectory
from nearline.protocol.errors import CheckpointCorrupt, UnsupportedCheckpoint

SINGLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"


def open_weights(directory: SourceDirectory, reporter: Reporter) -> dict[str, StoredTensor]:
    """List every tensor of a model directory by name.

    Raises CheckpointCorrupt for a missing shard, a tensor its shard lacks or a torn file, InvalidRequest for an
    index that points outside the directory, UnsupportedCheckpoint when there are no safetensors weights.
    """
    single = directory.file(SINGLE_NAME)
    if single is not None:
        return open_safetensors(single)
    index = directory.json(INDEX_NAME)
    if index is not None:
        return _open_shards(directory, index, reporter)
    raise _no_weights(directory)


def _open_shards(directory: SourceDirectory, index: dict[str, Any], reporter: Reporter) -> dict[str, StoredTensor]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointCorrupt(f"{directory.path / INDEX_NAME}: weight_map is not a map of tensor to file name")
    shards: dict[str, dict[str, StoredTensor]] = {}
    for name, shard in sorted(weight_map.items()):
        if shard in shards:
            continue
        path = directory.file(shard)
        if path is None:
            raise CheckpointCorrupt(
                f"{directory.path}: shard {shard} is missing, {INDEX_NAME} needs it for {name!r}; fetch it again"
            )
        shards[shard] = open_safetensors(path)
    tensors: dict[str, StoredTensor] = {}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CheckpointCorrupt(
                f"{directory.path / shard}: tensor {name!r} is not in this shard, though {INDEX_NAME} says so"
            )
        tensors[name] = shards[shard][name]
    _warn_of_lies(index, shards, tensors, reporter)
    return tensors


def _warn_of_lies(
    index: dict[str, Any],
    shards: dict[str, dict[str, StoredTensor]],
    tensors: dict[str, StoredTensor],
    reporter: Reporter,
) -> None:
    unlisted = sorted({name for shard in shards.values() for name in shard} - tensors.keys())
    if unlisted:
        reporter.warn(f"the shards hold tensors that {INDEX_NAME} does not list; ignored: {_some(unlisted)}")
    metadata = index.get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = sum(tensor.entry.num_bytes for tensor in tensors.values())
    if claimed is not None and claimed != actual:
        reporter.warn(f"{INDEX_NAME} claims {claimed} bytes of tensors, the shards hold {actual}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more


def _no_weights(directory: SourceDirectory) -> UnsupportedCheckpoint:
    where = f"{directory.path}: no {SINGLE_NAME}"
    if directory.names(".safetensors"):
        found = _some(directory.names(".safetensors"))
        return UnsupportedCheckpoint(f"{where} and no {INDEX_NAME}, only {found}; fetch the whole model again")
    pickled = [*directory.names(".bin"), *directory.names(".pt"), *directory.names(".pth"), *directory.names(".ckpt")]
    if pickled:
        return UnsupportedCheckpoint(
            f"{where}, only pickled weights ({_some(pickled)}), which can run code and are never opened; convert them: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) writes safetensors"
        )
    return UnsupportedCheckpoint(f"{where}; a model needs safetensors weights (pickled or GGUF ones do not count here)")

"""A PEFT LoRA directory becomes a draft: A and B of every served module, checked against the base they are for."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearline.checkpoint_store.adapter_changes import changes
from nearline.checkpoint_store.adapter_config import LoraSettings, read_settings
from nearline.checkpoint_store.adapter_modules import HEAD, AdapterModule, adapter_modules
from nearline.checkpoint_store.adapter_pack import PlacedModule, draft_pack, row_of
from nearline.checkpoint_store.adapter_tables import whole_tables
from nearline.checkpoint_store.adapter_tokens import check_tokens
from nearline.checkpoint_store.convert_files import CONFIG_NAME, to_json
from nearline.checkpoint_store.convert_model import DTYPE_NAMES, read_spec
from nearline.checkpoint_store.convert_types import Draft, Reporter
from nearline.checkpoint_store.publish import CHECKPOINTS
from nearline.checkpoint_store.safetensors_file import StoredTensor, open_safetensors
from nearline.checkpoint_store.source_directory import SourceDirectory
from nearline.checkpoint_store.types import WEIGHTS_NAME, Manifest, read_manifest
from nearline.protocol import LAYOUTS, CheckpointInfo, CheckpointKind, DecoderSpec, Digest, tensor_slots
from nearline.protocol.errors import AdapterMismatch, NotFound, UnsupportedCheckpoint

ADAPTER_NAME, ADAPTER_CONFIG_NAME = "adapter.json", "adapter_config.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
ADAPTER_WEIGHTS_NAME, ADAPTER_PICKLE_NAME = "adapter_model.safetensors", "adapter_model.bin"


def draft_adapter(
    directory: SourceDirectory, source: str, root: Path, base_digest: Digest, reporter: Reporter
) -> Draft:
    """Describe a PEFT directory as a checkpoint to publish, for one base model in the same store.

    Raises UnsupportedCheckpoint for features we do not serve, AdapterMismatch when it does not fit the base,
    CheckpointCorrupt for torn or non-finite weights, NotFound for an unknown base.
    """
    base, spec, base_tensors = _base(root, base_digest)
    if not LAYOUTS[spec.layout].takes_adapters:
        raise UnsupportedCheckpoint(
            f"adapters of {spec.architecture} models are not served, their projections are not the seven of Llama; "
            "merge it and add the result as a model: peft's merge_and_unload(), then save_pretrained(NEW_DIR)"
        )
    settings = read_settings(_config(directory), reporter)
    check_tokens(directory, SourceDirectory(root / CHECKPOINTS / base_digest))
    modules = adapter_modules(_weights(directory), spec.vocab_size)
    if not modules:
        raise AdapterMismatch(f"{directory.path}: the adapter changes no module at all; its weights file is empty")
    _check_saved(directory, settings, modules)
    dtype = _dtype(base_tensors, spec)
    tables = whole_tables(modules, base_tensors, spec, dtype)
    placed = _placed(modules, settings, spec)
    if modules:
        name, _ = min(modules.items(), key=lambda item: (-item[1].layer, item[0]))
        raise AdapterMismatch(
            f"{directory.path}: the adapter changes {name!r}, but the base {base.source} has layers 0 to "
            f"{spec.num_layers - 1}; was it trained on another model?"
        )
    rank = max((one.rank for one in placed), default=0)
    described = {one.module.name: _described(one, base_tensors) for one in placed}
    described |= {name: {"rank": 0, "changes": ["weight"]} | described.get(name, {}) for name in tables}
    files = _files(directory, {"rank": rank, "modules": described})
    info = CheckpointInfo(
        digest=Digest(""), kind=CheckpointKind.ADAPTER, num_bytes=0, family=spec.family,
        architecture=spec.architecture, source=source, dtype=DTYPE_NAMES[dtype], files=(),
        base_digest=base_digest, rank=rank,
    )  # fmt: skip
    return Draft((*draft_pack(placed, base_tensors, spec, dtype), *tables.values()), files, info)


def _check_saved(directory: SourceDirectory, settings: LoraSettings, modules: Mapping[str, AdapterModule]) -> None:
    there = {name.rpartition(".")[2] for name, module in modules.items() if "weight" in module.parts}
    missing = [name for name in settings.targets.saved if name not in there]
    if missing:
        raise AdapterMismatch(
            f"{directory.path}: adapter_config.json says that {', '.join(missing)} is replaced whole "
            "(modules_to_save), but its weights are not there; save the adapter again"
        )


def _placed(modules: dict[str, AdapterModule], settings: LoraSettings, spec: DecoderSpec) -> list[PlacedModule]:
    """Check the modules in the order in which they run and take them out of `modules`."""
    shapes = {slot.name: slot.shape for slot in tensor_slots(spec)}
    names = [slot.removesuffix(".weight") for slot in shapes]
    if HEAD not in names:
        names.append(HEAD)
        shapes[f"{HEAD}.weight"] = (spec.vocab_size, spec.model_dim)
    placed = []
    for name in (name for name in names if name in modules):
        module = modules.pop(name)
        rank = module.check(shapes[f"{name}.weight"], f"{name}.bias" in shapes, settings)
        if rank or "bias" in module.parts:
            scaling = settings.scaling(module.peft_name) if rank else 0.0
            placed.append(PlacedModule(module, row_of(name, spec), rank, scaling))
    return sorted(placed, key=lambda one: one.row)


def _described(one: PlacedModule, base: Mapping[str, StoredTensor]) -> dict[str, Any]:
    found = changes(one.module, base)
    return {"rank": one.rank, "scaling": one.scaling} | ({"changes": list(found)} if found else {})


def _dtype(base: Mapping[str, StoredTensor], spec: DecoderSpec) -> str:
    """The dtype in which the base is computed, so that an engine takes the adapter over as it lies."""
    names = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    stored = next((t.entry.dtype for n, t in base.items() if n.endswith("q_proj.weight")), names[spec.dtype])
    return stored if stored in names.values() else names[spec.dtype]


def _base(root: Path, base_digest: Digest) -> tuple[CheckpointInfo, DecoderSpec, dict[str, StoredTensor]]:
    path = root / CHECKPOINTS / base_digest
    if not re.fullmatch(r"[0-9a-f]{32}", base_digest) or not path.is_dir():
        raise NotFound(f"base checkpoint {base_digest!r} is not in {root}; import the base model first", param="base")
    manifest: Manifest = read_manifest(path)
    if manifest.info.kind is not CheckpointKind.MODEL:
        raise AdapterMismatch(f"the base {base_digest} is an adapter itself; name a model", param="base")
    config = SourceDirectory(path).json(CONFIG_NAME)
    weights = path / WEIGHTS_NAME
    return manifest.info, read_spec(config or {}), open_safetensors(weights) if weights.is_file() else {}


def _config(directory: SourceDirectory) -> dict[str, Any]:
    config = directory.json(ADAPTER_CONFIG_NAME)
    if config is None:
        is_model = directory.file(CONFIG_NAME) is not None
        hint = "it looks like a model; add it as a model" if is_model else "is this a PEFT adapter directory?"
        raise UnsupportedCheckpoint(f"{directory.path}: no {ADAPTER_CONFIG_NAME}; {hint}")
    return config


def _weights(directory: SourceDirectory) -> dict[str, StoredTensor]:
    path = directory.file(ADAPTER_WEIGHTS_NAME)
    if path is not None:
        return open_safetensors(path)
    if directory.file(ADAPTER_PICKLE_NAME) is not None:
        raise UnsupportedCheckpoint(
            f"{directory.path}: only {ADAPTER_PICKLE_NAME}, a pickle, which can run code and is never opened; load the "
            "adapter with peft and save_pretrained(NEW_DIR) to get safetensors"
        )
    raise UnsupportedCheckpoint(f"{directory.path}: no {ADAPTER_WEIGHTS_NAME}; fetch the whole adapter again")


def _files(directory: SourceDirectory, description: Mapping[str, Any]) -> dict[str, bytes]:
    files = {ADAPTER_NAME: to_json(description)}
    # Where an adapter brings its own chat template: beside its weights, or inside its tokenizer's settings.
    has_template = "chat_template" in (directory.json(TOKENIZER_CONFIG_NAME) or {})
    template_names = ("chat_template.jinja", *([TOKENIZER_CONFIG_NAME] if has_template else []))
    for name in (ADAPTER_CONFIG_NAME, *template_names):
        content = directory.read(name)
        if content is not None:
            files[name] = content
    return files

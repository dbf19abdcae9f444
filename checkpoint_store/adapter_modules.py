"""Which module each tensor of a PEFT adapter belongs to, and whether it fits the base. Refuses what is not served."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from nearline.checkpoint_store.adapter_config import LoraSettings
from nearline.checkpoint_store.numbers import DTYPES
from nearline.checkpoint_store.safetensors_file import StoredTensor
from nearline.protocol.errors import AdapterMismatch, CheckpointCorrupt, UnsupportedCheckpoint

_PREFIX = r"(?:base_model\.model\.)?"
_TENSOR = re.compile(
    _PREFIX + r"(?P<module>(?:model\.)?(?P<path>layers\.(?P<layer>\d+)\."
    r"(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj))\."
    r"(?:lora_(?P<part>[AB]|magnitude_vector)(?:\.(?!weight$)\w+)?(?:\.weight)?|(?:base_layer\.)?(?P<bias>bias))"
)
_TABLE = re.compile(
    _PREFIX + r"(?P<module>(?:model\.)?(?P<table>embed_tokens|lm_head))\."
    r"(?:lora_(?:embedding_)?(?P<part>[AB])(?:\.(?!weight$)\w+)?(?:\.weight)?"
    r"|(?:base_layer\.|modules_to_save\.(?:(?!weight$)\w+\.)?)?(?P<whole>weight)|(?P<other>.+))"
)
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
_TABLE_NAMES = {"embed_tokens": EMBEDDING, "lm_head": HEAD}


@dataclass(slots=True)
class AdapterModule:
    """One target of the adapter: its tensors by part ("A", "B", "magnitude_vector", "bias", "weight").

    `peft_name` is what peft's patterns are matched against. The token embedding and the head have no layer; a "weight",
    which only they have, replaces the base's.
    """

    name: str
    peft_name: str
    layer: int
    parts: dict[str, StoredTensor] = field(default_factory=dict)

    @property
    def is_embedding(self) -> bool:
        return self.name == EMBEDDING

    def check(self, base: tuple[int, ...], has_bias: bool, settings: LoraSettings) -> int:
        """Return the rank, 0 for a mere bias. Raises AdapterMismatch where parts, shapes or rank contradict."""
        for part, tensor in self.parts.items():
            if tensor.entry.dtype not in DTYPES:
                where = f"{tensor.path}: {tensor.entry.name!r}"
                raise UnsupportedCheckpoint(f"{where} is {tensor.entry.dtype}; save it as F32, F16 or BF16")
            shape = tensor.entry.shape
            if part in ("bias", "magnitude_vector") and shape not in ((base[0],), (base[0], 1)):
                raise AdapterMismatch(
                    f"{tensor.path}: {self.name!r} has a {part} of {shape}; the base's weight is {base}, which needs "
                    f"({base[0]},); was it trained on another model?"
                )
        if "bias" in self.parts and not has_bias:
            raise AdapterMismatch(
                f"{self.parts['bias'].path}: {self.name!r} has a trained bias, the base has none there; was it trained "
                "on another model?"
            )
        whole = self.parts.get("weight")
        if whole is not None and whole.entry.shape != base:
            raise AdapterMismatch(
                f"{whole.path}: {self.name!r} is {whole.entry.shape}, the base's is {base}; was it trained on another "
                "model?"
            )
        return self._check_pair(base, settings) if self.parts.keys() - {"bias", "weight"} else 0

    def _check_pair(self, base: tuple[int, ...], settings: LoraSettings) -> int:
        path = next(iter(self.parts.values())).path
        for part, other in ("AB", "BA"):
            if part not in self.parts:
                found = f"lora_{other}" if other in self.parts else "a magnitude"
                raise AdapterMismatch(f"{path}: {self.name!r} has {found} but no lora_{part}; save the adapter again")
        if not settings.targets.has(self.peft_name):
            raise AdapterMismatch(
                f"{path}: {self.name!r} has LoRA, but adapter_config.json does not name it (target_modules, "
                "exclude_modules, layers_to_transform, layers_pattern, modules_to_save), so peft would not load it; "
                "save the adapter again"
            )
        a, b = self.parts["A"].entry.shape, self.parts["B"].entry.shape
        if self.is_embedding:
            base = base[::-1]
        rank, expected = a[0] if a else 0, settings.rank(self.peft_name)
        if a != (rank, base[1]) or b != (base[0], rank) or rank == 0:
            raise AdapterMismatch(
                f"{path}: {self.name!r} has A {a} and B {b}; the base's weight is {base}, which needs "
                f"A (r, {base[1]}) and B ({base[0]}, r); was it trained on another model?"
            )
        if rank != expected:
            raise AdapterMismatch(
                f"{path}: {self.name!r} has rank {rank}, adapter_config.json says {expected} (r, rank_pattern); which "
                "scaling is meant cannot be known"
            )
        if settings.use_dora and self.layer < 0:
            raise UnsupportedCheckpoint(f"{path}: DoRA on {self.name!r} is not served; train it without use_dora there")
        if settings.use_dora != ("magnitude_vector" in self.parts):
            has, says = ("no magnitude", "DoRA") if settings.use_dora else ("a magnitude", "no DoRA")
            raise AdapterMismatch(
                f"{path}: {self.name!r} has {has}, adapter_config.json says {says} (use_dora); save it again"
            )
        return rank


def adapter_modules(weights: Mapping[str, StoredTensor], vocab_size: int) -> dict[str, AdapterModule]:
    """Group an adapter's tensors by the module they change.

    Raises UnsupportedCheckpoint for a tensor that changes what is not served, CheckpointCorrupt for one twice there.
    """
    modules: dict[str, AdapterModule] = {}
    for key, tensor in weights.items():
        match, table = _TENSOR.fullmatch(key), _TABLE.fullmatch(key)
        if match is not None:
            name, part, layer = f"model.{match['path']}", match["part"] or match["bias"], int(match["layer"])
        elif table is not None and table["other"] is None:
            match = table
            name, part, layer = _TABLE_NAMES[table["table"]], table["part"] or table["whole"], -1
            _check_vocabulary(key, tensor, part, vocab_size)
        else:
            raise UnsupportedCheckpoint(
                f"{tensor.path}: tensor {key!r} is not LoRA on q, k, v, o, gate, up or down projections, the embedding "
                "or the head, which is what is served; train the adapter on those modules"
            )
        module = modules.setdefault(name, AdapterModule(name, match["module"], layer))
        if part in module.parts:
            raise CheckpointCorrupt(f"{tensor.path}: lora_{part} of {name!r} is there twice ({key!r})")
        module.parts[part] = tensor
    return modules


def _check_vocabulary(key: str, tensor: StoredTensor, part: str, vocab_size: int) -> None:
    """Refuse rows for tokens that the base does not have."""
    shape = tensor.entry.shape
    if len(shape) != 2:
        raise AdapterMismatch(f"{tensor.path}: tensor {key!r} has shape {shape}; a matrix is expected")
    is_embedding = "embed_tokens" in key
    if part == "weight" or (part == "B") != is_embedding:
        rows = shape[1] if part == "A" else shape[0]
        if rows != vocab_size:
            raise UnsupportedCheckpoint(
                f"{tensor.path}: tensor {key!r} has {rows} tokens, the base {vocab_size}: an adapter with an extended "
                "vocabulary is not served; merge it and add the result as a model"
            )

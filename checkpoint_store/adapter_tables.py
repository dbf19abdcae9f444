"""Whole token embeddings and heads that an adapter brings (modules_to_save), in place of the base's."""

from collections.abc import Iterator, Mapping

from nearline.checkpoint_store.adapter_modules import EMBEDDING, HEAD, AdapterModule
from nearline.checkpoint_store.convert_types import Block, DraftTensor
from nearline.checkpoint_store.numbers import DTYPES, Floats, finite_blocks, floats_of, to_dtype
from nearline.checkpoint_store.safetensors_file import StoredTensor
from nearline.protocol import DecoderSpec
from nearline.protocol.errors import CheckpointCorrupt, UnsupportedCheckpoint


def whole_tables(
    modules: dict[str, AdapterModule], base: Mapping[str, StoredTensor], spec: DecoderSpec, dtype: str
) -> dict[str, DraftTensor]:
    """Describe the tables that differ from the base's, by module; a module of which nothing else is left is taken out.

    peft stores a copy of the base's own table beside LoRA on it: such a one is dropped. Raises UnsupportedCheckpoint
    for shapes or dtypes that are not the base's.
    """
    found = {}
    for name in (EMBEDDING, HEAD):
        module = modules.get(name)
        table = module.parts.get("weight") if module is not None else None
        if module is None or table is None:
            continue
        if table.entry.dtype not in DTYPES or table.entry.shape != (spec.vocab_size, spec.model_dim):
            raise UnsupportedCheckpoint(
                f"{table.path}: {name!r} is {table.entry.dtype} {table.entry.shape}; the base needs F32, F16 or BF16 "
                f"of {(spec.vocab_size, spec.model_dim)}"
            )
        of_base = base.get(f"{EMBEDDING if spec.is_tied else name}.weight")
        if of_base is None or not _are_equal(table, of_base, dtype):
            found[name] = _draft(name.rpartition(".")[2], table, dtype)
        if module.parts.keys() == {"weight"}:
            del modules[name]
    return found


def _draft(leaf: str, table: StoredTensor, dtype: str) -> DraftTensor:
    shape = table.entry.shape
    num_bytes = shape[0] * shape[1] * (4 if dtype == "F32" else 2)

    def blocks() -> Iterator[Block]:
        for values in _numbers(table):
            content = to_dtype(values, dtype)
            if content is None:
                raise CheckpointCorrupt(f"{table.path}: {table.entry.name!r} does not fit the base's dtype {dtype}")
            yield content

    return DraftTensor(f"{leaf}.weight", dtype, shape, num_bytes, blocks)


def _are_equal(table: StoredTensor, of_base: StoredTensor, dtype: str) -> bool:
    if of_base.entry.dtype not in DTYPES or of_base.entry.shape != table.entry.shape:
        return False
    if table.entry.dtype == of_base.entry.dtype:
        return all(a == b for a, b in zip(table.blocks(), of_base.blocks(), strict=True))
    ours, theirs = (b"".join(to_dtype(v, dtype) or b"" for v in _numbers(t)) for t in (table, of_base))
    return ours == theirs


def _numbers(tensor: StoredTensor) -> Iterator[Floats]:
    """Read a tensor's numbers block by block."""
    for block in finite_blocks(tensor):
        yield floats_of(block, tensor.entry.dtype)

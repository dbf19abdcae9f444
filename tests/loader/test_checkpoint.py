"""Tensors equal what safetensors reads, for every dtype and shape, without a copy where none is needed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open

from nearline.checkpoint_store import CheckpointStore, Manifest
from nearline.loader import TORCH_DTYPES, LoadedCheckpoint, MappedPool, attach, load_directory
from nearline.protocol.errors import CheckpointCorrupt, UnsupportedCheckpoint

Commit = Callable[..., Manifest]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7,), (5, 3), (2, 3, 4, 5), (257, 129)]


@pytest.fixture(params=["pool", "directory"])
def load(
    request: pytest.FixtureRequest,
    root: Path,
    checkpoints: ModuleType,
    open_store: Callable[..., CheckpointStore],
    map_pool: Callable[[CheckpointStore], MappedPool],
) -> Iterator[Callable[..., LoadedCheckpoint]]:
    """Commit tensors and load them, through the pool or straight from the directory."""
    opened: list[LoadedCheckpoint] = []

    def make(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> LoadedCheckpoint:
        manifest = checkpoints.commit(root / "checkpoints", tensors)
        directory = root / "checkpoints" / manifest.digest
        if request.param == "directory":
            return load_directory(directory, "cpu")
        store = open_store()
        lease = store.acquire(manifest.digest)
        opened.append(attach(map_pool(store), directory, lease.frames, "cpu"))
        return opened[-1]

    yield make
    for checkpoint in opened:
        checkpoint.close()


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, NaN or not."""

    def raw(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(raw(a), raw(b)))


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_every_dtype_and_shape_equals_safetensors_byte_for_byte(
    dtype: str, load: Callable[..., LoadedCheckpoint], root: Path, checkpoints: ModuleType
) -> None:
    itemsize = TORCH_DTYPES[dtype].itemsize
    tensors = {}
    for i, shape in enumerate(SHAPES):
        count = torch.Size(shape).numel()
        raw = checkpoints.random_bytes(count * itemsize, seed=i)
        tensors[f"t{i}"] = (dtype, shape, bytes(b & 1 for b in raw) if dtype == "BOOL" else raw)
    loaded = load(tensors)
    loaded.wait_for(list(tensors))
    with safe_open(root / "checkpoints" / loaded.manifest.digest / "model.safetensors", "pt") as oracle:
        assert set(oracle.keys()) == set(loaded.names())
        for name, (_, shape, _) in tensors.items():
            assert loaded.tensor(name).shape == shape
            assert same_bytes(loaded.tensor(name), oracle.get_tensor(name))


def test_names_with_dots_and_unicode_and_mixed_dtypes_are_kept(
    load: Callable[..., LoadedCheckpoint], root: Path, checkpoints: ModuleType
) -> None:
    tensors = {
        "model.layers.0.größe/weight": ("BF16", (3, 5), checkpoints.random_bytes(30, 0)),
        "ключ": ("I64", (2,), checkpoints.random_bytes(16, 1)),
        "": ("F8_E4M3", (3,), checkpoints.random_bytes(3, 2)),
        "odd": ("F32", (2,), checkpoints.random_bytes(8, 3)),
    }
    loaded = load(tensors)
    loaded.wait_for(list(tensors))
    with safe_open(root / "checkpoints" / loaded.manifest.digest / "model.safetensors", "pt") as oracle:
        for name in tensors:
            assert same_bytes(loaded.tensor(name), oracle.get_tensor(name))


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_aligned_tensors_are_views_and_unaligned_ones_are_copied_once(
    load: Callable[..., LoadedCheckpoint], checkpoints: ModuleType
) -> None:
    loaded = load({
        "a": ("F32", (4,), checkpoints.random_bytes(16, 0)),
        "byte": ("U8", (1,), b"x"),
        "unaligned": ("F32", (4,), checkpoints.random_bytes(16, 1)),
    })  # fmt: skip
    assert address(loaded.tensor("a")) == address(loaded.tensor("byte"))
    copy = loaded.tensor("unaligned")
    assert address(copy) != address(loaded.tensor("a"))
    assert address(loaded.tensor("unaligned")) == address(copy)
    assert same_bytes(copy, torch.frombuffer(bytearray(checkpoints.random_bytes(16, 1)), dtype=torch.float32))


def test_adjacent_tensors_fuse_as_one_view_in_their_order(
    load: Callable[..., LoadedCheckpoint], checkpoints: ModuleType
) -> None:
    rows = {"q": 8, "k": 4, "v": 4}
    loaded = load({n: ("BF16", (r, 6), checkpoints.random_bytes(r * 12, r)) for n, r in rows.items()})
    fused = loaded.fused(["q", "k", "v"])
    loaded.wait_for(["q", "k", "v"])
    assert fused.shape == (16, 6)
    assert address(fused) == address(loaded.tensor("q"))
    assert same_bytes(fused, torch.cat([loaded.tensor(n) for n in rows]))
    assert loaded.fused(["q"]).shape == (8, 6)


@pytest.mark.parametrize("names", [["q", "v"], ["v", "q"], ["k", "q"]])
def test_tensors_that_are_not_adjacent_fuse_as_one_copy(
    names: list[str], load: Callable[..., LoadedCheckpoint], checkpoints: ModuleType
) -> None:
    loaded = load({n: ("F32", (2, 3), checkpoints.random_bytes(24, ord(n))) for n in "qkv"})
    fused = loaded.fused(names)
    assert same_bytes(fused, torch.cat([loaded.tensor(n) for n in names]))
    assert address(loaded.fused(names)) == address(fused)


def test_adjacent_but_unaligned_tensors_fuse_as_a_copy(
    load: Callable[..., LoadedCheckpoint], checkpoints: ModuleType
) -> None:
    loaded = load({
        "byte": ("U8", (1,), b"x"),
        "a": ("F16", (2, 2), checkpoints.random_bytes(8, 1)),
        "b": ("F16", (3, 2), checkpoints.random_bytes(12, 2)),
    })  # fmt: skip
    assert same_bytes(loaded.fused(["a", "b"]), torch.cat([loaded.tensor("a"), loaded.tensor("b")]))


@pytest.mark.parametrize("others", [("F16", (2, 3)), ("F32", (2, 4)), ("F32", ())])
def test_tensors_that_cannot_be_concatenated_are_refused_by_name(
    others: tuple[str, tuple[int, ...]], load: Callable[..., LoadedCheckpoint]
) -> None:
    dtype, shape = others
    count = torch.Size(shape).numel() * TORCH_DTYPES[dtype].itemsize
    loaded = load({"a": ("F32", (2, 3), bytes(24)), "b": (dtype, shape, bytes(count))})
    with pytest.raises(CheckpointCorrupt, match=r"tensors a F32\[2, 3\] and b .* cannot be fused"):
        loaded.fused(["a", "b"])


def test_a_missing_tensor_is_named(load: Callable[..., LoadedCheckpoint]) -> None:
    loaded = load({"a": ("F32", (1,), bytes(4))})
    for ask in (loaded.tensor, lambda name: loaded.fused(["a", name]), lambda name: loaded.wait_for([name])):
        with pytest.raises(CheckpointCorrupt, match=r"has no tensor 'lm_head\.weight' \(it has 1 tensors"):
            ask("lm_head.weight")
    assert "a" in loaded
    assert "b" not in loaded


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (("F4", (2,), bytes(1)), UnsupportedCheckpoint, "tensor t: dtype F4 is not supported"),
        (("F32", (3,), bytes(8)), CheckpointCorrupt, r"tensor t: F32\[3\] needs 12 bytes, .* gives it 8"),
    ],
)
def test_an_entry_that_makes_no_sense_is_refused(
    entry: tuple[str, tuple[int, ...], bytes],
    error: type[Exception],
    message: str,
    load: Callable[..., LoadedCheckpoint],
) -> None:
    with pytest.raises(error, match=message):
        load({"t": entry}).tensor("t")


def test_a_tensor_outlives_the_checkpoint_it_came_from(
    load: Callable[..., LoadedCheckpoint], checkpoints: ModuleType
) -> None:
    data = checkpoints.random_bytes(400_000, 7)
    loaded = load({"w": ("U8", (400_000,), data)})
    loaded.wait_for(["w"])
    tensor = loaded.tensor("w")
    loaded.close()
    loaded.close()
    assert bytes(tensor.numpy()) == data
    with pytest.raises(RuntimeError, match="is closed"):
        loaded.tensor("w")

"""Publishing is all or nothing: whatever stops it, no half checkpoint is listed and no byte is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from nearline.checkpoint_store.convert_types import Draft, DraftTensor, Reporter
from nearline.checkpoint_store.incoming import staging_name, sweep_incoming
from nearline.checkpoint_store.publish import publish
from nearline.checkpoint_store.publish_digest import content_digest, verify_checkpoint
from nearline.checkpoint_store.safetensors_header import DTYPE_BITS, tensor_bytes
from nearline.checkpoint_store.types import WEIGHTS_NAME, read_manifest
from nearline.protocol import CheckpointInfo, CheckpointKind, Digest
from nearline.protocol.errors import CheckpointCorrupt, StorageFull
from tests.checkpoint_store.sources import edit_json, edit_tensors, leftovers, read_raw

BLANK = CheckpointInfo(Digest(""), CheckpointKind.MODEL, 0, "llama", "LlamaForCausalLM", "test", "float32", ())


def tensor(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> DraftTensor:
    return DraftTensor(name, dtype, shape, len(data), lambda: iter([data[:7], data[7:]]))


def draft(*tensors: DraftTensor, files: dict[str, bytes] | None = None) -> Draft:
    return Draft(tensors, {"config.json": b"{}"} if files is None else files, BLANK)


def some_bytes(dtype: str, shape: tuple[int, ...]) -> bytes:
    return bytes((i * 7 + len(dtype)) % 256 for i in range(tensor_bytes(dtype, shape)))


ONE = tensor("w", "U8", (100,), bytes(range(100)))


def test_every_dtype_shape_and_odd_name_comes_back_byte_for_byte(root: Path) -> None:
    shapes: list[tuple[int, ...]] = [(), (0, 3), (8,), (2, 4, 3)]
    raw = {
        f"{dtype}·{index}.ünï/名": (dtype, shape, some_bytes(dtype, shape))
        for dtype, bits in DTYPE_BITS.items()
        for index, shape in enumerate(shapes)
        if bits % 8 == 0 or shape not in ((), (0, 3))
    }
    manifest = publish(root, draft(*(tensor(name, *fields) for name, fields in raw.items())))
    path = root / "checkpoints" / manifest.digest / WEIGHTS_NAME
    assert read_raw(path) == raw
    with safe_open(path, "np") as file:
        assert set(file.keys()) == raw.keys()
    assert [entry.name for entry in manifest.tensors] == list(raw)


def test_chunks_cover_the_file_and_the_last_may_be_short(root: Path) -> None:
    size = 40 * 1024 * 1024 + 5
    big = DraftTensor("w", "U8", (size,), size, lambda: iter([b"ab" * (size // 2), b"c"]))
    manifest = publish(root, draft(big))
    assert len(manifest.chunk_digests) == -(-manifest.num_bytes // manifest.chunk_bytes) == 3
    assert verify_checkpoint(root / "checkpoints" / manifest.digest, Reporter()) == manifest


def test_the_name_depends_on_every_byte_and_on_nothing_else(root: Path) -> None:
    same = [publish(root, draft(ONE)).digest for _ in range(2)]
    other_bytes = publish(root, draft(tensor("w", "U8", (100,), bytes(range(99)) + b"\0"))).digest
    other_name = publish(root, draft(tensor("v", "U8", (100,), bytes(range(100))))).digest
    other_file = publish(root, draft(ONE, files={"config.json": b"{ }"})).digest
    more_files = publish(root, draft(ONE, files={"config.json": b"{}", "a": b""})).digest
    assert len({*same, other_bytes, other_name, other_file, more_files}) == 5
    assert leftovers(root) == sorted(
        f"checkpoints/{d}" for d in {*same, other_bytes, other_name, other_file, more_files}
    )


def test_names_and_contents_of_files_cannot_be_confused() -> None:
    assert content_digest(["c"], {"a": b"bc"}) != content_digest(["c"], {"ab": b"c"})
    assert content_digest(["c"], {"a": b"b", "c": b"d"}) != content_digest(["c"], {"a": b"b" + b"c" + b"d"})
    assert content_digest(["c"], {}, "base") != content_digest(["c"], {}, "")


@pytest.mark.parametrize("damage", ["weights", "file", "manifest", "missing"])
def test_importing_again_heals_a_damaged_checkpoint(root: Path, damage: str) -> None:
    manifest = publish(root, draft(ONE))
    directory = root / "checkpoints" / manifest.digest
    blob = (directory / WEIGHTS_NAME).read_bytes()
    if damage == "weights":
        (directory / WEIGHTS_NAME).write_bytes(blob[:-1] + b"\xff")
    elif damage == "file":
        (directory / "config.json").write_text("{}\n")
    elif damage == "manifest":
        (directory / "manifest.json").write_text("{")
    else:
        (directory / WEIGHTS_NAME).unlink()
    with pytest.raises(CheckpointCorrupt):
        verify_checkpoint(directory, Reporter())
    assert publish(root, draft(ONE)) == manifest
    assert verify_checkpoint(directory, Reporter()) == manifest
    assert leftovers(root) == [f"checkpoints/{manifest.digest}"]


def test_a_tensor_that_gives_too_few_bytes_is_no_checkpoint(root: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match="'w' gave 50 bytes, expected 100"):
        publish(root, draft(DraftTensor("w", "U8", (100,), 100, lambda: iter([b"x" * 50]))))
    assert leftovers(root) == []


def test_any_failure_while_reading_the_source_leaves_nothing(root: Path) -> None:
    def fail() -> Iterator[bytes]:
        yield b"x" * 50
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        publish(root, draft(DraftTensor("w", "U8", (100,), 100, fail)))
    assert leftovers(root) == []


def test_too_little_space_is_known_before_the_first_byte(root: Path) -> None:
    huge = DraftTensor("w", "U8", (2**50,), 2**50, lambda: iter(()))
    with pytest.raises(StorageFull, match=r"needs 11258999\d+ bytes, \d+ are available"):
        publish(root, draft(huge))
    assert leftovers(root) == []


# ---- the ends of a process ----

PUBLISH = """
import resource, sys, time
from pathlib import Path
from nearline.checkpoint_store.convert_types import Draft, DraftTensor
from nearline.checkpoint_store.publish import publish
from nearline.protocol import CheckpointInfo, CheckpointKind
info = CheckpointInfo("", CheckpointKind.MODEL, 0, "llama", "LlamaForCausalLM", "test", "float32", ())
size = 4 << 20
def blocks():
    yield bytes(size // 2)
    print("half", flush=True)
    {at_half}
    yield bytes(size // 2)
draft = Draft((DraftTensor("w", "U8", (size,), size, blocks),), {{"config.json": b"{{}}"}}, info)
{before}
publish(Path(sys.argv[1]), draft)
"""


def start(root: Path, at_half: str = "pass", before: str = "pass") -> subprocess.Popen[str]:
    code = PUBLISH.format(at_half=at_half, before=before)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_write_that_finds_no_space_cleans_up_and_says_so(root: Path) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))"
    _, errors = start(root, before=limit).communicate(timeout=60)
    assert "StorageFull" in errors
    assert "free space or remove a model, then import again" in errors
    assert leftovers(root) == []


def test_a_killed_import_lists_nothing_and_is_swept_once_it_is_dead(root: Path) -> None:
    process = start(root, at_half="time.sleep(60)")
    assert process.stdout
    assert process.stdout.readline() == "half\n"
    (left,) = leftovers(root)
    assert left.startswith("incoming/model-")
    assert sweep_incoming(root) == []
    process.kill()
    process.wait()
    process.communicate()
    assert leftovers(root) == [left]
    assert sweep_incoming(root) == [Path(left).name]
    assert leftovers(root) == []


def test_the_sweep_knows_a_process_id_that_was_given_to_another(root: Path) -> None:
    mine = root / "incoming" / staging_name("model")
    stem, pid, ticks, rest = mine.name.split("-")
    assert int(pid) == os.getpid()
    earlier = root / "incoming" / f"{stem}-{pid}-{int(ticks) - 1}-{rest}"
    for directory in (mine, earlier, root / "incoming" / "unknown"):
        directory.mkdir(parents=True)
    assert set(sweep_incoming(root)) == {earlier.name, "unknown"}
    assert leftovers(root) == [f"incoming/{mine.name}"]
    assert sweep_incoming(root / "nowhere") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_answered_with_needed_and_available_bytes(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(small)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        size = 5 << 20
        content = DraftTensor("w", "U8", (size,), size, lambda: filling(small, size))
        with pytest.raises(StorageFull, match=r"needs 6\d+ bytes, \d+ are available \(No space left on device\)"):
            publish(small, draft(content, files={}))
        assert leftovers(small) == []
    finally:
        (small / "ballast").unlink(missing_ok=True)
        subprocess.run(["umount", str(small)], check=True)


def filling(disk: Path, size: int) -> Iterator[bytes]:
    """Give a tensor's bytes while somebody else takes the space."""
    yield bytes(size // 2)
    (disk / "ballast").write_bytes(bytes(3 << 20))
    yield bytes(size - size // 2)


def test_sigterm_ends_an_import_without_a_trace(root: Path, tiny_llama_dir: Callable[..., Path]) -> None:
    source = tiny_llama_dir()
    edit_json(source / "config.json", vocab_size=400_000)
    edit_tensors(source, **{"model.embed_tokens.weight": ("F32", (400_000, 64), b"\1" * (400_000 * 64 * 4))})
    command = [
        sys.executable,
        "-m",
        "nearline.checkpoint_store",
        "import",
        "--root",
        str(root),
        "--source",
        str(source),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list((root / "incoming").glob("model-*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert '"code": "cancelled", "message": "cancelled by SIGTERM"' in output.splitlines()[-1]
    assert leftovers(root) == []


def test_two_imports_of_the_same_content_at_once_make_one_checkpoint(root: Path) -> None:
    processes = [start(root, at_half="time.sleep(0.3)") for _ in range(3)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0, 0]
    (left,) = leftovers(root)
    assert read_manifest(root / left).digest == Path(left).name


@pytest.mark.parametrize("damage", ["torn manifest", "edited manifest", "no manifest", "edited file", "no file"])
def test_a_store_finds_what_is_wrong_beside_the_weights(root: Path, damage: str) -> None:
    from nearline.checkpoint_store import CheckpointStore, StoreConfig

    manifest = publish(root, draft(ONE))
    directory = root / "checkpoints" / manifest.digest
    store = CheckpointStore(StoreConfig(root=root, dram_pool_bytes=16 << 20))
    try:
        store.verify(manifest.digest)
        victim = directory / ("manifest.json" if "manifest" in damage else "config.json")
        whole = victim.read_bytes()
        if damage.startswith("no"):
            victim.unlink()
        elif damage.startswith("torn"):
            victim.write_bytes(whole[: len(whole) // 2])
        else:
            victim.write_bytes(whole.replace(b'"family": "', b'"family": "x') if b"family" in whole else whole + b" ")
        with pytest.raises(CheckpointCorrupt, match=rf"{directory}.*import"):
            store.verify(manifest.digest)
        with pytest.raises(CheckpointCorrupt):
            store.acquire(manifest.digest)
        victim.write_bytes(whole)
        store.verify(manifest.digest)
        store.acquire(manifest.digest).release()
    finally:
        store.close()

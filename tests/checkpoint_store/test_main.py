"""The import process as the node agent and people start it: JSON lines, exit status, closed streams, the hub."""

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nearline.checkpoint_store import safetensors_file
from nearline.checkpoint_store.__main__ import main
from nearline.checkpoint_store.safetensors_file import read_blocks
from nearline.protocol import CheckpointInfo, CheckpointKind, from_plain
from nearline.protocol.errors import ErrorInfo
from tests.checkpoint_store.hub import SHA, Manners, hub
from tests.checkpoint_store.sources import edit_tensors, leftovers, random_f32

MODULE = [sys.executable, "-m", "nearline.checkpoint_store"]


@pytest.fixture(scope="module")
def source(tiny_llama_dir: Callable[..., Path]) -> Path:
    return tiny_llama_dir()


def run(*arguments: Any, **environment: str) -> tuple[int, list[dict[str, Any]], str]:
    done = subprocess.run(
        [*MODULE, *map(str, arguments)], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def info(lines: list[dict[str, Any]]) -> CheckpointInfo:
    return from_plain(CheckpointInfo, lines[-1]["checkpoint"])


def test_an_import_tells_its_progress_and_ends_with_the_checkpoint(root: Path, source: Path) -> None:
    status, lines, errors = run("import", "--root", root, "--kind", "model", "--source", source)
    assert (status, errors) == (0, "")
    checkpoint = info(lines)
    assert (checkpoint.kind, checkpoint.source) == (CheckpointKind.MODEL, str(source))
    assert (root / "checkpoints" / checkpoint.digest / "manifest.json").is_file()
    assert [set(line) for line in lines[:-1]] == [{"phase", "done_bytes", "total_bytes"}] * (len(lines) - 1)
    phases = [line["phase"] for line in lines[:-1]]
    assert list(dict.fromkeys(phases)) == ["reading", "writing"]
    last = {line["phase"]: (line["done_bytes"], line["total_bytes"]) for line in lines[:-1]}
    assert last["writing"] == (checkpoint.num_bytes, checkpoint.num_bytes)


def test_a_failed_import_ends_with_one_error_and_status_1(root: Path) -> None:
    status, lines, _ = run("import", "--root", root, "--source", "/no/such/thing")
    assert status == 1
    error = from_plain(ErrorInfo, lines[-1]["error"])
    assert (error.code, error.param) == ("invalid_request", "source")
    assert "/no/such/thing" in error.message
    assert sum("error" in line for line in lines) == 1


def test_warnings_go_to_stderr_and_leave_stdout_clean(root: Path, source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "extra")
    edit_tensors(tmp_path / "extra", **{"odd.tensor": random_f32((3,))})
    status, lines, errors = run("import", "--root", root, "--source", tmp_path / "extra")
    assert status == 0
    assert info(lines).digest
    assert "odd.tensor" in errors


@pytest.mark.parametrize("closing", ["2>&-", "2>/dev/full", "0<&- 2>&-"])
def test_a_closed_or_broken_stderr_changes_nothing(root: Path, source: Path, tmp_path: Path, closing: str) -> None:
    shutil.copytree(source, tmp_path / "extra")
    edit_tensors(tmp_path / "extra", **{"odd.tensor": random_f32((3,))})
    command = f'exec "$@" {closing}'
    arguments = [*MODULE, "import", "--root", str(root), "--source", str(tmp_path / "extra")]
    done = subprocess.run(["sh", "-c", command, "sh", *arguments], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0
    digest = info([json.loads(line) for line in done.stdout.splitlines()]).digest
    assert run("verify", "--root", root, "--digest", digest)[0] == 0


def test_an_import_nobody_listens_to_gives_up_and_cleans_up(root: Path, source: Path) -> None:
    arguments = [*MODULE, "import", "--root", str(root), "--source", str(source)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert leftovers(root) == []


def test_verify_passes_a_whole_checkpoint_and_names_what_is_wrong_with_another(root: Path, source: Path) -> None:
    digest = info(run("import", "--root", root, "--source", source)[1]).digest
    status, lines, _ = run("verify", "--root", root, "--digest", digest)
    assert (status, info(lines).digest) == (0, digest)
    weights = root / "checkpoints" / digest / "model.safetensors"
    blob = bytearray(weights.read_bytes())
    blob[-1] ^= 1
    weights.write_bytes(blob)
    status, lines, _ = run("verify", "--root", root, "--digest", digest)
    assert status == 1
    assert lines[-1]["error"]["code"] == "checkpoint_corrupt"
    assert "chunk 0" in lines[-1]["error"]["message"]
    status, lines, _ = run("verify", "--root", root, "--digest", "../" + digest)
    assert (status, lines[-1]["error"]["code"]) == (1, "not_found")


def test_the_import_process_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, nearline.checkpoint_store.convert, nearline.checkpoint_store.gguf_model as g; print(*sys.modules)"
    )
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "huggingface_hub"} & set(modules)


# ---- the hub ----


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """An empty hub cache and no proxy: the environment of a first download."""
    return {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}


def test_a_model_comes_from_the_hub_and_then_from_its_cache(
    root: Path, source: Path, tmp_path: Path, offline: dict[str, str]
) -> None:
    shutil.copytree(source, tmp_path / "repo")
    (tmp_path / "repo" / "pytorch_model.bin").write_bytes(b"pickle")
    (tmp_path / "repo" / "original").mkdir()
    (tmp_path / "repo" / "original" / "params.json").write_text("{}")
    requests: list[str] = []
    with hub("org/tiny", tmp_path / "repo", requests) as endpoint:
        status, lines, errors = run(
            "import", "--root", root, "--source", "hub:org/tiny@main", **offline, HF_ENDPOINT=endpoint
        )
    assert (status, errors) == (0, ""), lines[-1]
    local = info(run("import", "--root", root, "--source", source)[1])
    assert info(lines).digest == local.digest
    assert "downloading" in {line.get("phase") for line in lines}
    fetched = {path.rsplit("/", 1)[1] for path in requests if "/resolve/" in path}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= fetched
    assert not {"pytorch_model.bin", "params.json"} & fetched
    assert not (Path(offline["HF_HOME"]) / "hub").exists(), "the hub's cache would keep a second copy for ever"
    assert list((root / "downloads").iterdir()) == []


def test_a_model_in_the_hubs_cache_is_taken_from_there_online_and_offline(
    root: Path, source: Path, offline: dict[str, str]
) -> None:
    cache = Path(offline["HF_HOME"]) / "hub" / "models--org--tiny"
    (cache / "blobs").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(SHA)
    (cache / "snapshots" / SHA).mkdir(parents=True)
    for file in source.iterdir():
        shutil.copy(file, cache / "blobs" / f"blob-of-{file.name}")
        (cache / "snapshots" / SHA / file.name).symlink_to(f"../../blobs/blob-of-{file.name}")
    for path in cache.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    digest = info(run("import", "--root", root, "--source", source)[1]).digest
    requests: list[str] = []
    with hub("org/tiny", source, requests) as endpoint:
        online = run("import", "--root", root, "--source", "hub:org/tiny", **offline, HF_ENDPOINT=endpoint)[1]
    assert info(online).digest == digest
    assert not [path for path in requests if "/resolve/" in path]
    again = run("import", "--root", root, "--source", "hub:org/tiny", **offline, HF_HUB_OFFLINE="1")
    assert info(again[1]).digest == digest
    for folder in (cache, cache / "snapshots" / SHA):
        assert info(run("import", "--root", root, "--source", folder)[1]).digest == digest


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        (
            "hub:org/absent",
            "invalid_request",
            "org/absent does not exist or is private; check the name or",
        ),
        ("hub:org/tiny@nowhere", "invalid_request", "org/tiny at nowhere: no such revision"),
        ("hub:not a name!", "invalid_request", "is not a hub name; write hub:org/name[@revision]"),
    ],
)
def test_what_the_hub_does_not_have_is_said_plainly(
    root: Path, tmp_path: Path, offline: dict[str, str], source: str, code: str, words: str
) -> None:
    (tmp_path / "repo").mkdir()
    with hub("org/tiny", tmp_path / "repo", []) as endpoint:
        status, lines, _ = run("import", "--root", root, "--source", source, **offline, HF_ENDPOINT=endpoint)
    assert (status, lines[-1]["error"]["code"]) == (1, code)
    assert words in lines[-1]["error"]["message"]


def test_a_hub_out_of_reach_is_said_plainly(root: Path, offline: dict[str, str]) -> None:
    arguments = ("import", "--root", root, "--source", "hub:org/tiny")
    status, lines, _ = run(*arguments, **offline, HF_HUB_OFFLINE="1")
    assert status == 1
    assert "not (wholly) in the local cache and HF_HUB_OFFLINE is set" in lines[-1]["error"]["message"]
    status, lines, _ = run(*arguments, **offline, HF_ENDPOINT="http://127.0.0.1:9")
    assert (status, lines[-1]["error"]["code"]) == (1, "source_unavailable")
    assert "http://127.0.0.1:9/org/tiny cannot be fetched" in lines[-1]["error"]["message"]
    assert leftovers(root) == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"])
def test_a_file_of_the_source_that_cannot_be_read_is_named_as_the_callers_to_mend(
    root: Path, source: Path, tmp_path: Path, name: str
) -> None:
    """A folder in its place stands for every refusal of the system, of which root meets few."""
    copied = shutil.copytree(source, tmp_path / "copied")
    (copied / name).unlink(missing_ok=True)
    (copied / name).mkdir()
    status, lines, _ = run("import", "--root", root, "--source", copied)
    if status == 0:  # what is not needed may be left out
        return
    assert lines[-1]["error"]["code"] in ("invalid_request", "unsupported_checkpoint", "checkpoint_corrupt")
    assert str(copied) in lines[-1]["error"]["message"]


@pytest.fixture
def large_repo(tmp_path: Path, tiny_llama_dir: Callable[..., Path]) -> Path:
    """A model whose weights are large enough to be cut in the middle."""
    return shutil.copytree(tiny_llama_dir(hidden_size=128, intermediate_size=512), tmp_path / "large")


def test_a_hub_download_that_breaks_off_goes_on_where_it_was(
    root: Path, large_repo: Path, offline: dict[str, str]
) -> None:
    weights = (large_repo / "model.safetensors").stat().st_size
    manners = Manners(cuts=[weights // 4] + [0] * 5)
    with hub("org/large", large_repo, [], manners) as endpoint:
        arguments = ("import", "--root", root, "--source", "hub:org/large")
        status, lines, _ = run(*arguments, **offline, HF_ENDPOINT=endpoint)
        assert (status, lines[-1]["error"]["code"]) == (1, "source_unavailable")
        assert f"{weights // 4} bytes are kept, import again to go on" in lines[-1]["error"]["message"]
        manners.cuts = [weights // 4]
        status, lines, _ = run(*arguments, **offline, HF_ENDPOINT=endpoint)
    assert status == 0, lines[-1]
    assert info(lines).digest == info(run("import", "--root", root, "--source", large_repo)[1]).digest
    assert manners.num_bytes <= 1.1 * sum(path.stat().st_size for path in large_repo.iterdir())


def test_a_gated_repository_and_a_file_that_is_not_what_the_hub_says_are_named(
    root: Path, source: Path, offline: dict[str, str]
) -> None:
    arguments = ("import", "--root", root, "--source", "hub:org/tiny")
    with hub("org/tiny", source, [], Manners(is_gated=True)) as endpoint:
        gated = run(*arguments, **offline, HF_ENDPOINT=endpoint)[1][-1]["error"]
    assert gated["code"] == "permission_denied"
    assert "accept its licence on the hub and set HF_TOKEN" in gated["message"]
    with hub("org/tiny", source, [], Manners(sha256="0" * 64)) as endpoint:
        wrong = run(*arguments, **offline, HF_ENDPOINT=endpoint)[1][-1]["error"]
    assert wrong["code"] == "checkpoint_corrupt"
    assert "model.safetensors arrived with sha256 " in wrong["message"]
    assert leftovers(root) == []
    assert list((root / "downloads").iterdir()) == []


def test_a_private_repository_wants_the_token_and_a_wrong_one_is_told_from_none(
    root: Path, source: Path, tmp_path: Path, offline: dict[str, str]
) -> None:
    repo = shutil.copytree(source, tmp_path / "repo")
    arguments = ("import", "--root", root, "--source", "hub:org/private")
    with hub("org/private", repo, [], Manners(token="hf_right")) as endpoint:
        without = run(*arguments, **offline, HF_ENDPOINT=endpoint)[1][-1]["error"]
        wrong = run(*arguments, **offline, HF_ENDPOINT=endpoint, HF_TOKEN="hf_wrong")[1][-1]["error"]
        status, lines, _ = run(*arguments, **offline, HF_ENDPOINT=endpoint, HF_TOKEN="hf_right")
    assert "does not exist or is private; check the name or set HF_TOKEN" in without["message"]
    assert wrong["code"] == "permission_denied"
    assert "refuses this HF_TOKEN" in wrong["message"]
    assert status == 0
    assert "hf_right" not in json.dumps(lines)


def tiny_adapter(directory: Path, **config: Any) -> Path:
    """An adapter of one module of the tiny model, written without peft."""
    directory.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.ones(2, 64), name.format("B"): torch.ones(64, 2)}
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(settings | config))
    return directory


def test_the_revisions_of_a_base_and_of_its_adapter_are_each_its_own(
    root: Path, source: Path, tmp_path: Path, offline: dict[str, str]
) -> None:
    """`revision` in adapter_config.json is the base's, so it says nothing about where the adapter is."""
    of_base: list[str] = []
    with hub("org/tiny", source, of_base) as endpoint:
        lines = run("import", "--root", root, "--source", "hub:org/tiny@v1", **offline, HF_ENDPOINT=endpoint)[1]
    base = info(lines).digest
    assert "/api/models/org/tiny/revision/v1" in of_base
    directory = tiny_adapter(tmp_path / "a", base_model_name_or_path="org/tiny", revision="v1")
    arguments = ("import", "--root", root, "--kind", "adapter", "--base", base, "--source")
    for wanted, path in (("hub:org/a@v2", "/api/models/org/a/revision/v2"), ("hub:org/a", "/api/models/org/a")):
        of_adapter: list[str] = []
        with hub("org/a", directory, of_adapter) as endpoint:
            status, lines, _ = run(*arguments, wanted, **offline, HF_ENDPOINT=endpoint)
        assert (status, info(lines).base_digest) == (0, base)
        assert [asked for asked in of_adapter if asked.startswith("/api/")] == [path]
        assert not [asked for asked in of_adapter if "/v1" in asked or "org/tiny" in asked]


def swallowed(number: int) -> None:
    """Get a signal inside a finaliser, out of which nothing is raised."""

    class Finalised:
        def __del__(self) -> None:
            signal.raise_signal(number)

    Finalised()


def failing(number: int) -> None:
    """Get a signal inside code that fails over it in a way of its own."""
    try:
        signal.raise_signal(number)
    finally:
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        view = memoryview(memory)
        memory.close()
        del view


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("met_in", [swallowed, failing, signal.raise_signal])
def test_a_signal_cancels_wherever_it_finds_the_import(
    root: Path,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    met_in: Callable[[int], None],
) -> None:
    def blocks(*_: Any) -> Any:
        met_in(number)
        return read_blocks(*_)

    monkeypatch.setattr(safetensors_file, "read_blocks", blocks)
    heeded = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert main(["import", "--root", str(root), "--source", str(source)]) == 1
    finally:
        for each, handler in heeded.items():
            signal.signal(each, handler)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["error"]["code"], last["error"]["message"]) == ("cancelled", f"cancelled by {number.name}")
    assert leftovers(root) == []

"""Models and adapters from a web server: the same checkpoint as from the same files on disk."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from nearline.checkpoint_store import http_file
from nearline.checkpoint_store.convert import import_checkpoint
from nearline.checkpoint_store.convert_types import Reporter
from nearline.checkpoint_store.downloads import KEPT_S
from nearline.checkpoint_store.http_source import downloaded
from nearline.checkpoint_store.types import Manifest
from nearline.protocol import CheckpointKind
from nearline.protocol.errors import Cancelled, CheckpointCorrupt, Fault, InvalidRequest, NearlineError
from tests.checkpoint_store.ggufs import write_gguf
from tests.checkpoint_store.sources import import_model, leftovers, read_raw, write_raw
from tests.checkpoint_store.web import Web, web


@pytest.fixture(autouse=True)
def no_netrc_no_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(http_file, "RETRY_S", 0.0)


@pytest.fixture(scope="module")
def source(tiny_llama_dir: Callable[..., Path]) -> Path:
    return tiny_llama_dir()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Web]:
    (tmp_path / "web").mkdir()
    with web(tmp_path / "web") as state:
        yield state


def add(root: Path, url: str, reporter: Reporter | None = None) -> Manifest:
    return import_checkpoint(root, CheckpointKind.MODEL, url, reporter=reporter)


def downloads(root: Path) -> list[Path]:
    return sorted(p for p in (root / "downloads").rglob("*") if p.is_file())


def split_in_shards(directory: Path) -> None:
    """Rewrite a one-file model as two shards and their index."""
    tensors = read_raw(directory / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, members in parts.items():
        write_raw(directory / file, {name: tensors[name] for name in members})
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()


def test_a_directory_on_the_web_is_the_checkpoint_it_is_on_disk(root: Path, source: Path, server: Web) -> None:
    shutil.copytree(source, server.directory / "org" / "tiny" / "resolve" / "main")
    local = import_model(root, source)
    progress: list[tuple[str, int, int]] = []
    url = f"{server.url}/org/tiny/resolve/main/"
    manifest = add(root, url, Reporter(progress=lambda *p: progress.append(p)))
    assert manifest.digest == local.digest
    assert max(done for phase, done, _ in progress if phase == "downloading") == server.num_bytes
    assert downloads(root) == []
    assert list((root / "downloads").iterdir()) == []
    fresh = add(root.parent / "other", url)
    assert fresh.info.source == url


def test_shards_are_fetched_as_their_index_says(root: Path, source: Path, server: Web) -> None:
    shutil.copytree(source, server.directory / "m")
    split_in_shards(server.directory / "m")
    manifest = add(root, f"{server.url}/m?download=true")
    assert manifest.digest == import_model(root, source).digest
    (server.directory / "m" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"shard model-00002-of-00002\.safetensors is missing"):
        add(root, f"{server.url}/m")


@pytest.mark.parametrize("name", ["../config.safetensors", "/etc/x.safetensors", "pickle.bin", 7])
def test_an_index_that_names_anything_but_shards_beside_it_is_refused(
    root: Path, source: Path, server: Web, name: object
) -> None:
    shutil.copytree(source, server.directory / "m")
    (server.directory / "m" / "model.safetensors").unlink()
    edit_index = server.directory / "m" / "model.safetensors.index.json"
    edit_index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(InvalidRequest, match="which is no shard beside it"):
        add(root, f"{server.url}/m")
    edit_index.write_text("[]")
    with pytest.raises(CheckpointCorrupt, match="is no index of shards"):
        add(root, f"{server.url}/m")


def test_a_gguf_on_the_web_is_the_checkpoint_it_is_on_disk(root: Path, source: Path, server: Web) -> None:
    path = write_gguf(server.directory / "tiny q.gguf", AutoModelForCausalLM.from_pretrained(source))
    manifest = add(root, f"{server.url}/tiny%20q.gguf?x=1")
    assert manifest.digest == import_model(root, path).digest
    with pytest.raises(InvalidRequest, match=r"absent\.gguf: there is no such file \(404\)"):
        add(root, f"{server.url}/absent.gguf")


def test_three_interruptions_cost_no_byte_twice(root: Path, source: Path, server: Web) -> None:
    shutil.copytree(source, server.directory / "m")
    total = sum(p.stat().st_size for p in source.iterdir())
    url = f"{server.url}/m"

    def stop_after(num_bytes: int) -> Callable[[str, int, int], None]:
        def progress(phase: str, done: int, _total: int) -> None:
            if phase == "downloading" and done >= num_bytes:
                raise Cancelled("stopped by the test")

        return progress

    weights = (source / "model.safetensors").stat().st_size
    for fraction in (0.2, 0.5, 0.8):
        server.cuts = [int(weights * fraction)] * 3
        with pytest.raises(Cancelled):
            add(root, url, Reporter(progress=stop_after(int(total * fraction))))
    server.cuts = []
    assert add(root, url).digest == import_model(root, source).digest
    assert server.num_bytes <= 1.5 * total


def test_what_turns_out_corrupt_is_not_kept_for_the_next_try(root: Path, source: Path, server: Web) -> None:
    shutil.copytree(source, server.directory / "m")
    whole = (server.directory / "m" / "model.safetensors").read_bytes()
    (server.directory / "m" / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(CheckpointCorrupt, match="truncated at tensor"):
        add(root, f"{server.url}/m")
    assert leftovers(root) == downloads(root) == []
    (server.directory / "m" / "model.safetensors").write_bytes(whole)
    assert add(root, f"{server.url}/m").digest == import_model(root, source).digest


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("{}/nothing", "has no config.json and no adapter_config.json; give the URL of a .gguf file"),
        ("http://me:secret@127.0.0.1/m", "must not hold credentials"),
        ("http:///m", "names no host"),
        ("http://[", "is no URL"),
        ("https://[x]/y", "is no URL"),
        ("http://me:secret@x:99999/y", "is no URL"),
        ("http://a b/", "is no URL"),
    ],
)
def test_a_url_that_is_no_source_is_refused_saying_what_would_be(root: Path, server: Web, url: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        add(root, url.format(server.url))
    assert words in caught.value.message
    assert "secret" not in caught.value.message


def test_one_url_is_imported_once_at_a_time_and_old_leftovers_go(root: Path, source: Path, server: Web) -> None:
    shutil.copytree(source, server.directory / "m")
    old = root / "downloads" / "old"
    old.mkdir(parents=True)
    os.utime(old, (time.time() - KEPT_S - 60,) * 2)
    with downloaded(f"{server.url}/m", root, Reporter()) as path:
        assert (path / "config.json").exists()
        assert not old.exists()
        with (
            pytest.raises(InvalidRequest, match="is being imported right now"),
            downloaded(f"{server.url}/m", root, Reporter()),
        ):
            pass
        assert (path / "config.json").exists()
    assert not path.exists()


def test_an_adapter_comes_from_the_web(root: Path, source: Path, server: Web, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = import_model(root, source)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(source), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    )
    adapted.save_pretrained(server.directory / "lora")
    url, local = f"{server.url}/lora", str(server.directory / "lora")
    remote = import_checkpoint(root, CheckpointKind.ADAPTER, url, base.digest)
    assert remote.digest == import_checkpoint(root, CheckpointKind.ADAPTER, local, base.digest).digest


def test_a_server_out_of_reach_is_said_plainly(root: Path) -> None:
    with pytest.raises(Fault, match=r"http://127\.0\.0\.1:9/m/config\.json cannot be fetched: .*import again"):
        add(root, "http://127.0.0.1:9/m")
    with pytest.raises(NearlineError):
        add(root, "https://127.0.0.1:9/m.gguf")

"""What a source string may be, and what a wrong one is answered with."""

import os
from pathlib import Path

import pytest

from nearline.checkpoint_store.source import locate
from nearline.checkpoint_store.source_directory import SourceDirectory
from nearline.protocol.errors import CheckpointCorrupt, InvalidRequest


def find(source: str) -> Path:
    return locate(source)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "my models" / "ünï"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def test_a_directory_is_found_by_absolute_relative_home_and_file_name(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_dir.parent)
    monkeypatch.setenv("HOME", str(model_dir.parent))
    spaced = model_dir.as_uri()
    assert "%20" in spaced
    for source in (str(model_dir), "ünï", "./ünï", "~/ünï", f"file:{model_dir}", f"file://{model_dir}", spaced):
        assert find(source) == model_dir


def test_a_hub_cache_folder_means_its_main_snapshot(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    for sha in ("aaa", "bbb"):
        (repository / "snapshots" / sha).mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="aaa, bbb"):
        find(str(repository))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("bbb")
    assert find(str(repository)) == repository / "snapshots" / "bbb"
    assert find(str(repository / "snapshots" / "aaa")) == repository / "snapshots" / "aaa"


def test_a_folder_with_one_gguf_file_means_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert find(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidRequest, match=r"several GGUF files; name one of them: a\.gguf, b\.gguf"):
        find(str(tmp_path))
    assert find(str(tmp_path / "b.gguf")) == tmp_path / "b.gguf"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "empty"),
        ("a\0b", "NUL"),
        ("/no/such/model", "no such file or directory: /no/such/model"),
        ("org/name", "say hub:org/name"),
        ("file://elsewhere/models/a", "only local files"),
        ("/etc/hostname", "no GGUF file"),
    ],
)
def test_a_source_that_is_nothing_is_refused_naming_what_was_tried(source: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        find(source)
    assert words in caught.value.message
    assert caught.value.param == "source"


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc/passwd", "a\0b", "."])
def test_a_name_that_leads_outside_the_directory_is_refused(model_dir: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="not a name inside"):
        SourceDirectory(model_dir).file(name)


def test_a_link_that_leads_outside_the_directory_is_refused(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (model_dir / "tokenizer.json").symlink_to(tmp_path / "secret")
    (model_dir / "additional_chat_templates").symlink_to(tmp_path)
    with pytest.raises(InvalidRequest, match="a link that leads outside"):
        SourceDirectory(model_dir).read("tokenizer.json")
    assert SourceDirectory(model_dir).names(folder="additional_chat_templates") == []


def test_a_snapshots_links_to_its_own_blobs_are_followed_and_no_others(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "123").write_text('{"a": 1}')
    (tmp_path / "secret").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/123")
    (snapshot / "tokenizer.json").symlink_to("../../../secret")
    link = tmp_path / "link"
    os.symlink(snapshot, link)
    for path in (snapshot, link):
        directory = SourceDirectory(path)
        assert directory.json("config.json") == {"a": 1}
        with pytest.raises(InvalidRequest, match="leads outside"):
            directory.read("tokenizer.json")


def test_a_dangling_link_and_a_directory_are_no_files(model_dir: Path) -> None:
    (model_dir / "dangling").symlink_to("nowhere")
    (model_dir / "folder").mkdir()
    directory = SourceDirectory(model_dir)
    assert (directory.file("dangling"), directory.file("folder"), directory.read("absent")) == (None, None, None)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\xff", "[" * 100_000])
def test_json_that_is_no_object_is_refused_naming_the_file(model_dir: Path, text: str) -> None:
    (model_dir / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointCorrupt, match=r"config\.json"):
        SourceDirectory(model_dir).json("config.json")


@pytest.mark.parametrize("source", ["/proc/self/mem", "x" * 100_000, "/" + "y" * 300, "/" + "d/" * 3000])
def test_what_the_system_refuses_to_read_is_the_fault_of_the_source(source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        find(source)
    assert refused.value.param == "source"
    assert source[:100] in refused.value.message
    assert len(refused.value.message) < 700

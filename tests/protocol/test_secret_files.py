"""Tokens and keys on disk: whole or not there, readable by their owner alone, and never empty."""

import errno
import os
import stat
from pathlib import Path

import pytest

from nearline.protocol.errors import InvalidRequest
from nearline.protocol.secret_files import cluster_token, read_secret, write_secret


def test_what_is_written_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "node.token"
    write_secret(path, "s3cret")
    assert (read_secret(path, "--token-file"), stat.S_IMODE(path.stat().st_mode)) == ("s3cret", 0o600)
    assert os.listdir(tmp_path) == ["node.token"]


def test_a_full_disk_leaves_no_empty_secret_and_no_half_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    path = tmp_path / "node.token"
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            write_secret(path, "s3cret")
        assert os.listdir(tmp_path) == []
    write_secret(path, "first")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_secret(path, "second")
    assert path.read_text() == "first"


@pytest.mark.parametrize(
    ("text", "said"), [("", "is empty"), (" \n\n", "is empty"), ("a\nb\n", "one line"), (None, "No")]
)
def test_a_file_without_one_secret_is_refused_by_name(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidRequest, match=said) as refused:
        read_secret(path, "--token-file")
    assert f"--token-file {path}" in str(refused.value)


def test_the_clusters_token_is_the_files_else_the_environments_and_never_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEARLINE_CLUSTER_TOKEN", raising=False)
    assert cluster_token(None, "--token-file") is None
    monkeypatch.setenv("NEARLINE_CLUSTER_TOKEN", " from-env\n")
    assert cluster_token(None, "--token-file") == "from-env"
    (tmp_path / "token").write_text("from-file\n")
    assert cluster_token(tmp_path / "token", "--token-file") == "from-file"
    monkeypatch.setenv("NEARLINE_CLUSTER_TOKEN", "")
    with pytest.raises(InvalidRequest, match="NEARLINE_CLUSTER_TOKEN is empty"):
        cluster_token(None, "--token-file")

"""What `nearline model add` makes of a source, and what the machine that imports it then finds."""

from pathlib import Path

import pytest

from nearline.checkpoint_store.source import locate
from nearline.client.commands.models import absolute


def test_every_way_to_write_a_local_path_is_the_same_directory_for_a_server_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    directory = home / "my models" / "ünï"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(home))
    forms = [str(directory), "ünï", "./ünï", "../my models/ünï", "~/my models/ünï"]
    forms += [f"file:{directory}", f"file://{directory}", f"file://localhost{directory}", directory.as_uri()]
    monkeypatch.chdir(directory.parent)
    sent = [absolute(form) for form in forms]
    monkeypatch.chdir("/")
    assert [locate(form) for form in sent] == [directory] * len(forms)


@pytest.mark.parametrize("source", ["hub:org/name", "hub:org/name@v1", "https://example.org/m", "http://example.org/m"])
def test_what_is_no_local_path_is_sent_as_it_was_written(source: str) -> None:
    assert absolute(source) == source

"""Where downloads lie: what may hold the same bytes is filled by one import at a time."""

from pathlib import Path

import pytest

from nearline.checkpoint_store.downloads import download_folder
from nearline.protocol.errors import InvalidRequest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://host/d", "https://host/d"),
        ("peer:d@http://one", "peer:d@http://two,http://one"),
        ("hub:org/d", "hub:org/d@main"),
        ("int8:hub:org/d", "hub:org/d"),
    ],
)
def test_two_names_of_one_source_are_refused_at_once_and_not_one_after_the_other(
    tmp_path: Path, one: str, other: str
) -> None:
    with download_folder(one, tmp_path) as folder:
        with pytest.raises(InvalidRequest, match="is being imported right now"), download_folder(other, tmp_path):
            pass
        with download_folder(f"{one}x".replace("@", "x@", 1), tmp_path) as another:
            assert another != folder
    with download_folder(other, tmp_path) as again:
        assert again == folder

"""One file from a web server that breaks off, changes its mind, refuses and redirects."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearline.checkpoint_store import http_file
from nearline.checkpoint_store.http_file import HttpFile
from nearline.protocol.errors import Fault, Forbidden, InvalidRequest
from tests.checkpoint_store.web import Web, web

BODY = bytes(range(256)) * 400


@pytest.fixture(autouse=True)
def no_netrc_no_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(http_file, "RETRY_S", 0.0)
    for name in ("HF_TOKEN", "HF_ENDPOINT", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Web]:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a.bin").write_bytes(BODY)
    with web(tmp_path / "web") as state:
        yield state


def fetch(server: Web, tmp_path: Path, path: str = "/a.bin") -> tuple[bool, Path, list[tuple[int, int]]]:
    progress: list[tuple[int, int]] = []
    target = tmp_path / "got"
    is_there = HttpFile(server.url + path, target).fetch(lambda *p: progress.append(p))
    return is_there, target, progress


def test_a_file_arrives_whole_with_progress(server: Web, tmp_path: Path) -> None:
    is_there, target, progress = fetch(server, tmp_path)
    assert is_there
    assert target.read_bytes() == BODY
    assert progress[0] == (0, len(BODY))
    assert progress[-1] == (len(BODY), len(BODY))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["got", "web"]
    assert fetch(server, tmp_path)[0]
    assert len(server.requests) == 1, "what is whole is not fetched again"


def test_a_broken_transfer_goes_on_where_it_broke_off(server: Web, tmp_path: Path) -> None:
    server.cuts = [30_000, 0, 50_000]
    assert fetch(server, tmp_path)[1].read_bytes() == BODY
    assert server.num_bytes == len(BODY)
    assert [headers.get("Range") for _, headers in server.requests] == [None, *["bytes=30000-"] * 2, "bytes=80000-"]


def test_a_later_fetch_goes_on_with_what_an_earlier_one_left(server: Web, tmp_path: Path) -> None:
    server.cuts = [40_000] + [0] * http_file.NUM_TRIES
    with pytest.raises(Fault, match=r"a\.bin cannot be fetched: .*; 40000 bytes are kept, import again to go on"):
        fetch(server, tmp_path)
    server.cuts = []
    assert fetch(server, tmp_path)[1].read_bytes() == BODY
    assert server.num_bytes == len(BODY)


def test_a_file_that_changed_meanwhile_is_fetched_from_its_start(server: Web, tmp_path: Path) -> None:
    server.cuts = [40_000] + [0] * http_file.NUM_TRIES
    with pytest.raises(Fault):
        fetch(server, tmp_path)
    server.cuts = []
    (server.directory / "a.bin").write_bytes(BODY[::-1])
    assert fetch(server, tmp_path)[1].read_bytes() == BODY[::-1]


@pytest.mark.parametrize("setting", ["has_etags", "has_ranges"])
def test_without_proof_or_ranges_a_broken_transfer_starts_over(server: Web, tmp_path: Path, setting: str) -> None:
    setattr(server, setting, False)
    server.cuts = [40_000, 50_000]
    assert fetch(server, tmp_path)[1].read_bytes() == BODY


def test_a_part_that_is_already_the_whole_is_taken(server: Web, tmp_path: Path) -> None:
    server.cuts = [len(BODY) - 1]
    (tmp_path / "got.part").write_bytes(BODY)
    (tmp_path / "got.part.json").write_text(json.dumps({"validator": "x", "total": len(BODY)}))
    server.etag = lambda body: "x"  # type: ignore[method-assign]
    assert fetch(server, tmp_path)[1].read_bytes() == BODY
    assert server.num_bytes == 0


def test_a_torn_state_file_means_starting_over(server: Web, tmp_path: Path) -> None:
    (tmp_path / "got.part").write_bytes(b"junk")
    (tmp_path / "got.part.json").write_text("{")
    assert fetch(server, tmp_path)[1].read_bytes() == BODY


def test_a_busy_server_is_asked_again_and_one_that_stays_so_is_named(server: Web, tmp_path: Path) -> None:
    server.statuses = [503, 429, 500]
    assert fetch(server, tmp_path)[0]
    (tmp_path / "got").unlink()
    server.statuses = [503] * http_file.NUM_TRIES
    with pytest.raises(Fault, match="the server answers 503"):
        fetch(server, tmp_path)


def test_what_is_not_there_and_what_is_refused_differ(server: Web, tmp_path: Path) -> None:
    assert fetch(server, tmp_path, "/absent")[0] is False
    server.authorization = "Bearer right"
    with pytest.raises(Forbidden, match=r"answers 401, it wants credentials; put them into ~/\.netrc for 127\.0\.0\.1"):
        fetch(server, tmp_path)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password wrong\n")
    with pytest.raises(Forbidden, match="answers 403"):
        fetch(server, tmp_path)
    server.statuses = [400]
    with pytest.raises(InvalidRequest, match="answers 400"):
        fetch(server, tmp_path)
    with pytest.raises(Fault, match=r"cannot be fetched: .*refused"):
        HttpFile("http://127.0.0.1:9/a.bin", tmp_path / "got").fetch(lambda *_: None)


def test_credentials_come_from_netrc_or_are_the_hubs_token_and_do_not_follow_to_another_host(
    server: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    server.authorization = "Basic bWU6c2VjcmV0"
    assert fetch(server, tmp_path)[0]
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    server.authorization = "Bearer hf_abc"
    (tmp_path / "got").unlink()
    assert fetch(server, tmp_path)[0]
    with web(server.directory) as other:
        server.redirects = {"/r": f"{other.url}/a.bin"}
        (tmp_path / "got").unlink()
        assert fetch(server, tmp_path, "/r")[1].read_bytes() == BODY
        assert "Authorization" not in other.requests[0][1]
    server.redirects = {"/r": "file:///etc/passwd"}
    with pytest.raises((InvalidRequest, Fault)):
        HttpFile(f"{server.url}/r", tmp_path / "passwd").fetch(lambda *_: None)
    (tmp_path / "netrc").write_text("nonsense here\n")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(InvalidRequest, match="netrc file cannot be read"):
        HttpFile(f"{server.url}/a.bin", tmp_path / "again").fetch(lambda *_: None)

"""`adapter add` of a pattern: every PEFT directory under its own name, a summary, and a status that tells the truth."""

import json
from pathlib import Path

import pytest
from aiohttp import web

from nearline.client.commands.bulk import adapter_directories
from nearline.protocol.errors import InvalidRequest
from tests.client.conftest import Server
from tests.client.test_cli import nearline


@pytest.fixture
def directories(tmp_path: Path) -> Path:
    for name in ("zeta", "alpha", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "readme.txt").write_text("not an adapter")
    return tmp_path


async def registrar(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if body["name"] == "broken":
        return web.json_response({"error": {"message": "rank [8] is not 4", "code": "adapter_mismatch"}}, status=422)
    progress = {"phase": "write", "done_bytes": 1, "total_bytes": 1}
    frames = "".join(f"data: {json.dumps(event)}\n\n" for event in (progress, {"id": body["name"], **body}))
    return web.Response(text=frames + "data: [DONE]\n\n", content_type="text/event-stream")


def test_each_directory_is_registered_under_its_name_and_failures_are_named(directories: Path, server: Server) -> None:
    server.handler = registrar
    done = nearline("adapter", "add", f"{directories}/*", "--base", "m", url=server.url)
    assert done.returncode == 1
    assert "2 of 3 adapters are registered on m" in done.stdout
    assert "broken: rank [8] is not 4" in done.stderr
    (directories / "broken" / "adapter_config.json").unlink()
    assert nearline("adapter", "add", f"{directories}/*", "--base", "m", url=server.url).returncode == 0


def test_programs_get_both_lists(directories: Path, server: Server) -> None:
    server.handler = registrar
    shown = json.loads(
        nearline("adapter", "add", f"{directories}/*", "--base", "m", "--json", "--replace", url=server.url).stdout
    )
    assert [row["id"] for row in shown["registered"]] == ["alpha", "zeta"]
    assert shown["registered"][0]["source"] == str(directories / "alpha")
    assert shown["registered"][0]["replace"] is True
    assert [(row["name"], row["error"]["code"]) for row in shown["failed"]] == [("broken", "adapter_mismatch")]


def test_a_pattern_without_adapters_or_with_one_name_twice_is_refused(directories: Path) -> None:
    with pytest.raises(InvalidRequest, match="quote the pattern"):
        adapter_directories(f"{directories}/no*")
    (directories / "notes" / "alpha").mkdir()
    (directories / "notes" / "alpha" / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="both be called 'alpha'"):
        adapter_directories(f"{directories}/**")

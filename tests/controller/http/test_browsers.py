"""A web page somewhere may not use the front door through its visitor's browser; our own dashboard may."""

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from nearline.controller.http.browsers import host_name, is_ours
from nearline.controller.tenants import Tenants
from tests.controller.http.conftest import FrontDoor, serve
from tests.controller.http.test_app import check_envelope

MODEL = {"name": "evil", "source": "/m"}


async def test_pages_of_other_origins_change_nothing(front: FrontDoor) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1"):
        for path, body in (
            ("/admin/models", MODEL),
            ("/admin/models/tiny/evict", b""),
            ("/v1/jobs", {"model": "tiny"}),
        ):
            status, answer, _ = await front.post(path, body, Origin=origin)
            assert (status, check_envelope(answer)["code"]) == (403, "permission_denied"), origin
            assert "call it from the server of that page" in answer["error"]["message"]
        async with front.session.delete(front.url + "/admin/models/tiny", headers={"Origin": origin}) as response:
            assert response.status == 403
    assert set(front.door.registry.models) == {"tiny", "org/tiny:v1"}


async def test_the_dashboards_own_calls_pass(front: FrontDoor) -> None:
    body = {"model": "tiny", "prompt": "a"}
    assert (await front.post("/v1/completions", body, Origin=front.url))[0] == 200
    own = front.url.replace("127.0.0.1", "localhost")
    assert (await front.post("/v1/completions", body, Origin=own, Host=own.partition("://")[2]))[0] == 200
    assert (await front.get("/admin/fleet"))[0] == 200


@pytest.mark.parametrize("sent", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data", None])
async def test_a_body_that_a_page_may_send_unasked_is_refused_with_the_cure(front: FrontDoor, sent: str | None) -> None:
    """The three types of an HTML form, and none, as of a Blob: browsers send these across origins without asking."""
    data = b'{"model": "tiny", "prompt": "a"}'
    headers = {"Content-Type": sent} if sent else {}
    async with aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as session:
        for path in ("/v1/completions", "/admin/models"):
            async with session.post(front.url + path, data=data, headers=headers) as response:
                answer = await response.json()
            assert (response.status, check_envelope(answer)["code"]) == (415, "unsupported_media_type")
            assert "Content-Type: application/json" in answer["error"]["message"]
    assert not front.runtime.handles


async def test_json_passes_however_it_is_written_and_no_body_needs_no_type(front: FrontDoor) -> None:
    for sent in ("application/json", "Application/JSON; charset=utf-8", "application/json ;x=y"):
        status, _, _ = await front.post("/v1/completions", {"model": "tiny", "prompt": "a"}, Content_Type=sent)
        assert status == 200, sent
    async with front.session.post(front.url + "/v1/jobs/none/cancel") as response:
        assert response.status == 404


async def test_a_name_that_was_pointed_here_reads_nothing(front: FrontDoor) -> None:
    port = front.url.rpartition(":")[2]
    for host in (f"evil.example:{port}", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80"):
        for path in ("/v1/models", "/admin/fleet"):
            status, answer, _ = await front.get(path, Host=host)
            assert (status, answer["error"]["code"]) == (403, "permission_denied"), host
            assert "--allow-host NAME" in answer["error"]["message"]
        assert (await front.get("/health/live", Host=host, Origin="http://watch.example"))[0] == 200
        async with front.session.get(front.url + "/metrics", headers={"Host": host}) as response:
            assert response.status == 200
    for host in ("localhost", f"LOCALHOST:{port}", "127.0.0.1", f"[::1]:{port}", "192.168.1.5:80"):
        assert (await front.get("/v1/models", Host=host))[0] == 200, host


async def test_a_proxy_with_a_login_that_keeps_its_own_name_passes_once_that_is_allowed(make_door: Any) -> None:
    door, runtime = await make_door(host_names=frozenset({"models.example"}))
    async for front in serve(door, runtime):
        for host in ("models.example", "Models.Example.", "models.example:8443"):
            origin = f"https://{host.lower()}"
            body = {"model": "tiny", "prompt": "a"}
            assert (await front.post("/v1/completions", body, Host=host, Origin=origin))[0] == 200, host
        assert (await front.get("/v1/models", Host="other.example"))[0] == 403
        assert (await front.get("/v1/models", Host="models.example", Origin="https://evil.example"))[0] == 403


@pytest.mark.parametrize("origin", ["app://obsidian.md", "file://", "tauri://localhost", "vscode-webview://1a2b"])
async def test_a_desktop_application_is_no_page_that_somebody_visits(front: FrontDoor, origin: str) -> None:
    assert (await front.post("/v1/completions", {"model": "tiny", "prompt": "a"}, Origin=origin))[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "HTTPS://evil.example", "null", "http://127.0.0.1"])
async def test_no_page_connects_as_a_node_not_even_by_a_name_that_was_pointed_here(make_door: Any, origin: str) -> None:
    """Browsers ask nobody before they open a WebSocket, and say from which page."""

    async def linked(request: web.Request) -> web.StreamResponse:
        return web.json_response("linked")

    door, runtime = await make_door()
    async for front in serve(door, runtime, linked):
        for host in ("gpu1.lan:8000", origin.partition("://")[2] or "null"):
            assert (await front.get("/internal/node", Host=host))[:2] == (200, "linked")
            assert (await front.get("/internal/node", Host=host, Origin=origin))[0] == 403


async def test_what_is_open_to_the_network_answers_to_any_name(make_door: Any) -> None:
    door, runtime = await make_door(is_loopback=False)
    async for front in serve(door, runtime):
        assert (await front.get("/v1/models", Host="gpu1.lan:8000"))[0] == 200
        assert (await front.get("/v1/models", Host="gpu1.lan:8000", Origin="http://evil.example"))[0] == 403


async def test_where_a_key_is_needed_it_is_what_counts(make_door: Any) -> None:
    door, runtime = await make_door(tenants=Tenants.of(["ann=k"]))
    async for front in serve(door, runtime):
        headers = {"Host": "models.example", "Origin": "https://app.example"}
        assert (await front.get("/v1/models", **headers))[0] == 401
        assert (await front.get("/v1/models", Authorization="Bearer k", **headers))[0] == 200
        for sent in ("application/x-www-form-urlencoded", "text/plain;charset=UTF-8"):
            headers = {"Content-Type": sent, "Authorization": "Bearer k"}
            assert (await front.post("/v1/completions", {"model": "tiny", "prompt": "a"}, **headers))[0] == 200


@pytest.mark.parametrize("host", ["", "localhost", "127.0.0.1:8000", "[::1]", "[fe80::1]:80", "10.0.0.1"])
def test_addresses_and_localhost_are_nobodys_elses(host: str) -> None:
    assert is_ours(host)


@pytest.mark.parametrize("host", ["localhost.:8000", "nearline.localhost", "a.b.LOCALHOST:80", "Gpu1:8000", "gpu1."])
def test_names_below_localhost_never_leave_the_machine_and_others_may_be_allowed(host: str) -> None:
    assert is_ours(host, frozenset({"gpu1"}))


@pytest.mark.parametrize(
    "host",
    ["a.b", "1.2.3", "localhost.x", "xlocalhost", "[::1].x", "x:y:z", "127.1", "2130706433", "a b", "x.gpu1", "gpu1.x"],
)
def test_whatever_dns_might_answer_is_not(host: str) -> None:
    assert not is_ours(host, frozenset({"gpu1"}))


def test_a_name_to_allow_is_a_name_alone() -> None:
    assert (host_name("Models.Example."), host_name("host.docker.internal")) == (
        "models.example",
        "host.docker.internal",
    )
    for text in ("", ".", "*", "a:80", "https://a", "a/b", "a b", "*.example", "a..b"):
        with pytest.raises(ValueError, match="--allow-host"):
            host_name(text)

"""/admin: what it says of many models at once."""

import re

from nearline.protocol import ModelId, ModelSpec
from tests.controller.http.conftest import FrontDoor, checkpoint


async def test_a_list_of_models_takes_one_look_at_the_fleet(front: FrontDoor) -> None:
    for index in range(50):
        await front.door.registry.put_model(ModelSpec(ModelId(f"m{index}"), checkpoint(f"c{index}"), 1.0))
    looks = 0

    def snapshot() -> object:
        nonlocal looks
        looks += 1
        row = {"dram_bytes": 0, "ssd_bytes": 1000}
        node = {"id": "n", "is_connected": True, "residency": {"c7": row}}
        instance = {"model": "m3", "state": "ready"}
        waiting = [
            {"id": "m3", "num_waiting": 2, "num_missing": 0, "missing_because": None},
            {"id": "m3", "num_waiting": 1, "num_missing": 1, "missing_because": "no slot is free"},
        ]
        return {"nodes": [node], "instances": [instance], "models": waiting, "queues": []}

    front.runtime.snapshot = snapshot  # type: ignore[method-assign,assignment]
    _, listed, _ = await front.get("/admin/models")
    assert looks == 1
    found = {model["id"]: model for model in listed["data"]}
    assert len(found) == 52
    assert (found["m3"]["state"], found["m3"]["num_instances"], found["m3"]["num_waiting"]) == ("ready", 1, 3)
    assert (found["m3"]["num_missing"], found["m3"]["missing_because"]) == (1, "no slot is free")
    assert (found["m7"]["num_missing"], found["m7"]["missing_because"]) == (0, None)
    assert [found[name]["tier"] for name in ("m3", "m7", "m8")] == ["device", "ssd", "remote"]
    assert (found["tiny"]["adapters"], found["m7"]["adapters"]) == (["acme/pirate"], [])


async def test_the_fleet_at_once_says_what_its_lists_say(front: FrontDoor) -> None:
    status, fleet, _ = await front.get("/admin/fleet")
    assert status == 200
    for kind in ("models", "instances", "queues"):
        assert fleet[kind] == (await front.get(f"/admin/{kind}"))[1]["data"]
    assert [model["id"] for model in fleet["models"]]
    assert [node["id"] for node in fleet["nodes"]] == [n["id"] for n in (await front.get("/admin/nodes"))[1]["data"]]
    assert not any("residency" in node or "profiles" in node for node in fleet["nodes"])


async def test_a_browser_gets_a_page_that_needs_nothing_from_elsewhere(front: FrontDoor) -> None:
    async with front.session.get(front.url + "/", headers={"Accept": "text/html,*/*;q=0.8"}) as response:
        page = await response.text()
        assert response.content_type == "text/html"
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert page.startswith("<!doctype html>")
    assert not re.findall(r"https?://|//[a-z]+\.|src=|href=|innerHTML", page)
    assert 'fetch("admin/fleet"' in page


async def test_a_name_that_is_none_comes_with_what_was_meant_or_what_it_names(front: FrontDoor) -> None:
    base = {"name": "x", "base": "tinny", "source": "/a"}
    asked = [
        (await front.get("/admin/models/tinny"), "no model is named 'tinny'; did you mean 'tiny'?"),
        (await front.get("/admin/models/acme/pirate"), "no model is named 'acme/pirate'; it is an adapter"),
        (await front.get("/admin/models/zzz"), "no model is named 'zzz'; `nearline model list` shows all"),
        (await front.get("/admin/adapters/acme/pirat"), "did you mean 'acme/pirate'?"),
        (await front.post("/admin/models/tinny/verify", b""), "did you mean 'tiny'?"),
        (await front.get("/admin/adapters/tiny"), "no adapter is named 'tiny'; it is a model"),
        (await front.post("/admin/adapters", base), "no model is named 'tinny'; did you mean 'tiny'?"),
        (await front.post("/admin/adapters", base | {"base": "zzz"}), "add the base of this adapter first"),
    ]
    for (status, answer, _), said in asked:
        assert status == 404
        assert said in answer["error"]["message"]
    async with front.session.delete(front.url + "/admin/models/tinny") as response:
        assert "did you mean 'tiny'?" in (await response.json())["error"]["message"]

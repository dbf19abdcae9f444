"""What may be called, as those who call it see it."""

from nearline.protocol import ModelId, ModelSpec
from tests.controller.http.conftest import FrontDoor, checkpoint


async def test_who_may_only_call_sees_no_path_of_the_server(front: FrontDoor) -> None:
    hub = checkpoint("d7", source="hub:org/name@main")
    await front.door.registry.put_model(ModelSpec(ModelId("from-hub"), hub, 1.0))
    small = checkpoint("d8", source="int8:hub:org/name")
    await front.door.registry.put_model(ModelSpec(ModelId("small"), small, 1.0))
    web = checkpoint("d9", source="https://user:secret@files.example/m.gguf?token=hub:x")
    await front.door.registry.put_model(ModelSpec(ModelId("web"), web, 1.0))
    _, listed, _ = await front.get("/v1/models")
    roots = {row["id"]: row["root"] for row in listed["data"]}
    assert roots == {
        "tiny": None, "org/tiny:v1": None, "acme/pirate": None, "web": None, "from-hub": "org/name@main",
        "small": "org/name",
    }  # fmt: skip
    assert (await front.get("/admin/models/tiny"))[1]["source"] == "/models/tiny"

"""What a registration says at its end; and a name that is removed meanwhile: it ends, and nothing of it comes back."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from nearline.controller.http.registration import Registrar
from nearline.protocol import CheckpointKind, Digest
from nearline.protocol.errors import StateUnavailable
from tests.controller.http.conftest import FrontDoor, checkpoint, until

ADAPTER = {"name": "new", "base": "tiny", "source": "/slow"}
MODEL = {"name": "new", "source": "/slow"}


async def delete(front: FrontDoor, path: str) -> tuple[int, Any]:
    async with front.session.delete(front.url + path) as response:
        return response.status, await response.json()


async def begin(front: FrontDoor, kind: str, body: dict[str, Any]) -> "asyncio.Task[Any]":
    """A registration whose import has begun and goes on until `front.runtime.import_gate` opens."""
    front.runtime.imports["/slow"] = checkpoint("d8")
    front.runtime.import_gate.clear()
    asking = asyncio.create_task(front.post(f"/admin/{kind}s", body))
    await until(lambda: bool(front.runtime.begun_imports))
    return asking


@pytest.mark.parametrize(("kind", "body"), [("model", MODEL), ("adapter", ADAPTER)])
async def test_removing_a_name_that_is_being_registered_cancels_its_import(
    front: FrontDoor, kind: str, body: dict[str, Any]
) -> None:
    asking = await begin(front, kind, body)
    other = "adapter" if kind == "model" else "model"
    assert (await delete(front, f"/admin/{other}s/new"))[0] == 404, "no such thing has that name, or will"
    assert not asking.done()
    assert await delete(front, f"/admin/{kind}s/new") == (200, {"id": "new", "object": kind, "deleted": True})
    status, answer, _ = await asking
    assert (status, answer["error"]["code"]) == (499, "cancelled")
    assert "'new' was removed while it was being registered" in answer["error"]["message"]
    assert front.runtime.closed_imports == ["/slow"]
    assert (await delete(front, f"/admin/{kind}s/new"))[0] == 404
    front.runtime.import_gate.set()
    assert (await front.post(f"/admin/{kind}s", body))[0] == 201, "the name is free"
    assert front.runtime.num_registering == 0


async def test_removing_a_name_that_is_being_replaced_ends_both(front: FrontDoor) -> None:
    front.runtime.imports["/old"] = checkpoint("d7")
    assert (await front.post("/admin/models", {"name": "new", "source": "/old"}))[0] == 201
    front.runtime.begun_imports.clear()
    asking = await begin(front, "model", MODEL | {"replace": True})
    assert (await delete(front, "/admin/models/new"))[0] == 200
    assert (await asking)[0] == 499
    assert "new" not in front.runtime.models
    assert "new" not in front.door.registry.models


async def test_a_removal_that_is_refused_leaves_the_replacement_alone(front: FrontDoor) -> None:
    asking = await begin(front, "model", {"name": "tiny", "source": "/slow", "replace": True})
    assert (await delete(front, "/admin/models/tiny"))[0] == 400, "adapters stand on it"
    assert not asking.done()
    front.runtime.import_gate.set()
    await asking


async def test_a_name_that_is_just_being_written_is_removed_after_that(front: FrontDoor) -> None:
    is_writing, go_on = asyncio.Event(), asyncio.Event()
    put = front.door.registry.put_model

    async def slow(spec: Any) -> None:
        is_writing.set()
        await go_on.wait()
        await put(spec)

    front.door.registry.put_model = slow  # type: ignore[method-assign]
    front.runtime.imports["/m"] = checkpoint("d9")
    adding = asyncio.create_task(front.post("/admin/models", {"name": "new", "source": "/m"}))
    await is_writing.wait()
    removing = asyncio.create_task(delete(front, "/admin/models/new"))
    await asyncio.sleep(0.05)
    go_on.set()
    assert (await adding)[0] == 201
    assert (await removing)[0] == 200
    assert "new" not in front.runtime.models
    assert "new" not in front.door.registry.models


async def test_a_change_that_fails_after_its_caller_has_left_is_logged() -> None:
    go_on = asyncio.Event()

    async def fail() -> Any:
        await go_on.wait()
        raise StateUnavailable("Redis is away")

    changing = asyncio.create_task(Registrar()._complete(fail()))
    await asyncio.sleep(0.01)
    changing.cancel()
    await asyncio.wait([changing])
    with capture_logs() as logs:
        go_on.set()
        await until(lambda: bool(logs))
    assert "Redis is away" in logs[0]["error"]


async def test_what_is_registered_says_whether_it_or_its_base_has_a_chat_template(front: FrontDoor) -> None:
    front.runtime.imports["/m"] = checkpoint("d5", files=("tokenizer.json",))
    front.runtime.imports["/a"] = checkpoint("a5", CheckpointKind.ADAPTER, base_digest=Digest("d5"), rank=4, files=())
    templates = ("tokenizer_config.json",)
    front.runtime.imports["/b"] = checkpoint("a6", CheckpointKind.ADAPTER, base_digest=Digest("d5"), files=templates)
    front.runtime.imports["/c"] = checkpoint("a7", CheckpointKind.ADAPTER, base_digest=Digest("d0"), files=())
    said = {}
    for path, name, base in (("/m", "raw", ""), ("/a", "a5", "raw"), ("/b", "a6", "raw"), ("/c", "a7", "tiny")):
        body = {"name": name, "source": path, **({"base": base} if base else {})}
        _, row, _ = await front.post("/admin/adapters" if base else "/admin/models", body)
        said[name] = row["has_chat_template"]
    assert said == {"raw": False, "a5": False, "a6": True, "a7": True}

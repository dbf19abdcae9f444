"""An action that cannot be carried out costs what it was for, and nothing else."""

from dataclasses import replace

import pytest
from aiohttp import web

from nearline.controller.node_link import NodeLinks
from nearline.controller.runtime import Runtime
from nearline.protocol import InstanceId, NodeId
from nearline.protocol.errors import NearlineError
from nearline.protocol.frames import EnsureInstance, StopInstance, ToAgent
from tests.controller.test_runtime import Fleet, collect, eventually, fleet, request

__all__ = ["fleet"]


def unencodable(name: str = "bad") -> object:
    asked = request(name)
    return replace(asked, sampling=replace(asked.sampling, top_k=10**20))


async def test_a_request_no_frame_can_hold_ends_alone_when_the_instance_is_warm(fleet: Fleet) -> None:
    async with fleet.agent():
        await collect(fleet.runtime.open(request("warm")))
        beside = fleet.runtime.open(request("beside", 20))
        with pytest.raises(NearlineError, match="could not be handed"):
            fleet.runtime.open(unencodable())  # type: ignore[arg-type]
        await collect(beside)
        assert fleet.runtime.core.fleet.requests == {}
        await collect(fleet.runtime.open(request("after")))
        assert fleet.runtime.counters.num_action_errors == 1


async def test_a_request_no_frame_can_hold_ends_alone_when_the_model_is_cold(fleet: Fleet) -> None:
    handle = fleet.runtime.open(unencodable())  # type: ignore[arg-type]
    beside = fleet.runtime.open(request("beside"))
    async with fleet.agent():
        with pytest.raises(NearlineError, match="could not be handed"):
            await anext(handle)
        await collect(beside)
        assert fleet.runtime.core.fleet.requests == {}


async def test_a_start_that_cannot_be_asked_for_is_a_failed_start(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, failures = NodeLinks.send, [1, 1]

    def breaks_twice(self: NodeLinks, node_id: NodeId, frame: ToAgent) -> bool:
        if isinstance(frame, EnsureInstance) and failures:
            failures.pop()
            raise OverflowError("int too big to convert")
        return send(self, node_id, frame)

    monkeypatch.setattr(NodeLinks, "send", breaks_twice)
    async with fleet.agent():
        await collect(fleet.runtime.open(request()))
    assert not failures


async def test_a_join_that_fails_leaves_no_dead_link(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    serve, links, frame = NodeLinks.serve, list[NodeLinks](), StopInstance(InstanceId("i"), 0.0)

    async def noted(self: NodeLinks, call: web.Request) -> web.WebSocketResponse:
        links.append(self)
        return await serve(self, call)

    def breaks(self: Runtime, report: object) -> None:
        assert links[0].send(NodeId("n1"), frame), "it fails with the link made"
        raise RuntimeError("the join failed")

    monkeypatch.setattr(NodeLinks, "serve", noted)
    with monkeypatch.context() as patched:
        patched.setattr(Runtime, "node_joined", breaks)
        async with fleet.agent() as agent:
            await eventually(lambda: not agent.is_connected)
        await eventually(lambda: not links[0].send(NodeId("n1"), frame))
    async with fleet.agent():
        await collect(fleet.runtime.open(request()))

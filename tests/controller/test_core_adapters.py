"""Adapters over two nodes: each is loaded where its requests go, and that is few places."""

import random

import pytest

from nearline.controller import events as happened
from nearline.controller.actions import Dispatch
from nearline.controller.config import CoreConfig
from nearline.protocol import AdapterSpec, CheckpointKind, Digest, ModelId
from tests.controller.fleets import World, checkpoint, model, report


@pytest.fixture(autouse=True)
def _many_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.controller.fleets.MAX_RUNNING", 32)


def two_nodes(num_adapters: int) -> World:
    made = World(CoreConfig(dispatch_headroom=1))
    made.post(happened.ModelAdded(model("a", min_replicas=2, max_replicas=2)))
    names = [f"lora{i}" for i in range(num_adapters)]
    for name in names:
        info = checkpoint(name, 1000, CheckpointKind.ADAPTER)
        made.post(happened.AdapterAdded(AdapterSpec(ModelId(name), ModelId("a"), info, 0.0)))
    for node in ("n1", "n2"):
        made.add_node(report(node, digests=["digest-of-a", *names]))
    made.start_all()
    return made


def serve(made: World, num_requests: int, num_adapters: int, at_once: int) -> list[tuple[str, str]]:
    """Serve requests of random adapters, some at once; return (instance, adapter) of each dispatch."""
    draw, running = random.Random(0), []
    for index in range(num_requests):
        name = f"lora{draw.randrange(num_adapters)}"
        made.arrive(f"r{index}", adapter_id=ModelId(name), adapter_digest=Digest(name))
        running.append(f"r{index}")
        if len(running) >= at_once:
            made.finish(running.pop(0))
        made.sleep(0.05)
    sent = [action for action in made.actions if isinstance(action, Dispatch)]
    requests = {e.info.request_id: e.info for e, _ in made.journal if isinstance(e, happened.RequestArrived)}
    return [(str(one.instance_id), str(requests[one.request_id].adapter_digest)) for one in sent]


def test_eight_adapters_on_two_nodes_are_loaded_about_eight_times_in_four_hundred_requests() -> None:
    sent = serve(two_nodes(8), 400, 8, at_once=6)
    assert len(sent) == 400
    assert len(set(sent)) <= 8 + 3, "an instance reads an adapter when first sent a request of it"
    assert len({instance for instance, _ in sent}) == 2


def test_homes_are_chosen_anew_when_an_instance_goes_and_replay_alike() -> None:
    made = two_nodes(4)
    serve(made, 60, 4, at_once=6)
    before = {i.instance_id: set(i.homes) for i in made.core.fleet.instances.values()}
    assert sorted(len(homes) for homes in before.values()) != [0, 0]
    assert {d for homes in before.values() for d in homes} == {f"lora{i}" for i in range(4)}
    made.crash(made.instances("a")[0])
    made.arrive("late", adapter_id=ModelId("lora0"), adapter_digest=Digest("lora0"))
    made.start_all()
    serve_later = serve(made, 0, 4, at_once=1)
    assert serve_later, "requests go on"

"""Who gets a request: a table of situations with the choice and its reason."""

import pytest

from nearline.controller.config import CoreConfig
from nearline.controller.policy.dispatch import choose, has_room
from nearline.controller.queues import RequestRecord
from nearline.controller.state import InstanceRecord, ModelRecord, NodeRecord
from nearline.protocol import Digest, InstanceId, InstanceSpec, InstanceState, ModelId
from tests.controller.fleets import info, model, report

CONFIG = CoreConfig(dispatch_headroom=2)
DIGEST = Digest("digest-of-a")


def request(name: str = "r", **settings: object) -> RequestRecord:
    return RequestRecord(info(name, **settings), DIGEST, 1, 0.0, 0.0)


def instance(name: str, num_running: int, *, adapter: str = "", prefix: int = 0, lora: str = "") -> InstanceRecord:
    node = NodeRecord(report(digests=[lora] if lora else []))
    node.apply(node.report)
    spec = InstanceSpec(InstanceId(name), ModelId("a"), DIGEST)
    made = InstanceRecord(spec, node, ModelRecord(model("a")), 0.0, state=InstanceState.READY, max_running=8)
    made.in_flight = {f"{name}-{n}": request() for n in range(num_running)}  # type: ignore[misc]
    if adapter:
        made.adapters[Digest(adapter)] = None
    if prefix:
        made.prefixes[prefix] = None
    return made


TABLE = [
    ("the least loaded", [instance("i1", 4), instance("i2", 3)], {}, "i2", "3 of 8 places taken"),
    ("the smaller id of equals", [instance("i2", 3), instance("i1", 3)], {}, "i1", "3 of 8 places taken"),
    ("beyond max_running only the headroom", [instance("i1", 9)], {}, "i1", "9 of 8 places taken"),
    ("nobody when all are full", [instance("i1", 10)], {}, None, ""),
    (
        "a slightly fuller one that knows the prefix",
        [instance("i1", 3), instance("i2", 4, prefix=7)],
        {"prefix_hash": 7},
        "i2",
        "4 of 8 places taken, knows its prefix",
    ),
    (
        "not a much fuller one that knows the prefix",
        [instance("i1", 3), instance("i2", 6, prefix=7)],
        {"prefix_hash": 7},
        "i1",
        "3 of 8 places taken",
    ),
    (
        "one that has the adapter loaded",
        [instance("i1", 0, lora="d"), instance("i2", 1, adapter="d", lora="d")],
        {"adapter_id": "x", "adapter_digest": "d"},
        "i2",
        "1 of 8 places taken, knows its adapter",
    ),
    (
        "only nodes that hold the adapter",
        [instance("i1", 0), instance("i2", 5, lora="d")],
        {"adapter_id": "x", "adapter_digest": "d"},
        "i2",
        "5 of 8 places taken",
    ),
]


@pytest.mark.parametrize(("what", "instances", "wish", "expected", "reason"), TABLE, ids=[row[0] for row in TABLE])
def test_the_choice_is(
    what: str, instances: list[InstanceRecord], wish: dict[str, object], expected: str | None, reason: str
) -> None:
    roomy = [one for one in instances if has_room(one, 0.0, CONFIG)]
    choice = choose(roomy, request(**wish), CONFIG)
    assert (choice.instance_id if choice else None) == expected
    assert (choice.reason if choice else "") == reason


def test_a_suspect_goes_alone_to_an_idle_instance_and_nobody_joins_it_before_its_first_token() -> None:
    suspect = request("s")
    suspect.num_fruitless = 2
    busy, idle = instance("i1", 1), instance("i2", 0)
    assert choose([busy], suspect, CONFIG) is None
    choice = choose([busy, idle], suspect, CONFIG)
    assert choice is not None
    assert choice.instance_id == "i2"
    idle.in_flight[suspect.info.request_id] = suspect
    assert not has_room(idle, 0.0, CONFIG)
    suspect.has_token = True
    assert has_room(idle, 0.0, CONFIG)


@pytest.mark.parametrize("problem", ["loading", "stopping", "disconnected"])
def test_an_instance_that_cannot_take_requests_has_no_room(problem: str) -> None:
    made = instance("i1", 0)
    if problem == "loading":
        made.state = InstanceState.LOADING
    made.is_stopping = problem == "stopping"
    made.node.is_connected = problem != "disconnected"
    assert not has_room(made, 0.0, CONFIG)

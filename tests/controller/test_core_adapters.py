"""Adapters over two nodes: each is loaded where its requests go, and that is few places."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nearline.controller import events as happened
from nearline.controller.actions import DeleteCheckpoint, Dispatch, EnsureInstance, PrepareAdapter
from nearline.controller.config import CoreConfig
from nearline.protocol import AdapterSpec, CheckpointKind, Digest, ModelId
from nearline.protocol.errors import ErrorInfo
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
    return sent_to(made)


def sent_to(made: World) -> list[tuple[str, str]]:
    """(instance, adapter) of each dispatch."""
    sent = [action for action in made.actions if isinstance(action, Dispatch)]
    requests = {e.info.request_id: e.info for e, _ in made.journal if isinstance(e, happened.RequestArrived)}
    return [(str(one.instance_id), str(requests[one.request_id].adapter_digest)) for one in sent]


def test_while_another_name_needs_a_removed_adapters_bytes_no_event_searches_for_it() -> None:
    class Counted(dict[Any, Any]):
        num_searches = 0

        def values(self) -> Any:
            Counted.num_searches += 1
            return super().values()

    made = two_nodes(4)
    copy = AdapterSpec(ModelId("copy"), ModelId("a"), checkpoint("lora0", 1000, CheckpointKind.ADAPTER), 0.0)
    made.post(happened.AdapterAdded(copy))
    made.post(happened.AdapterRemoved(ModelId("lora0")))
    made.arrive("r", adapter_id=ModelId("copy"), adapter_digest=Digest("lora0"))
    made.core.fleet.adapters, made.core.fleet.requests = (
        Counted(made.core.fleet.adapters),
        Counted(made.core.fleet.requests),
    )
    for _ in range(20):
        made.core.on(happened.Woke(), made.now)
    assert Counted.num_searches == 0
    made.post(happened.AdapterRemoved(ModelId("copy")))
    assert not any(isinstance(action, DeleteCheckpoint) for action in made.actions), "a request still needs it"
    made.finish("r")
    deleted = [action.digest for action in made.actions if isinstance(action, DeleteCheckpoint)]
    assert deleted == ["lora0"]


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


def asked(made: World) -> list[tuple[str, str]]:
    """Which instance was asked to read which adapter ahead, in order, since this was asked last."""
    return [(str(one.instance_id), str(one.digest)) for one in made.take(PrepareAdapter)]


def one_node(**settings: int) -> World:
    made = World(CoreConfig(**settings))  # type: ignore[arg-type]
    made.post(happened.ModelAdded(model("a", keep_alive_s=30.0)))
    for name in ("lora0", "lora1", "lora2"):
        info = checkpoint(name, 1000, CheckpointKind.ADAPTER)
        made.post(happened.AdapterAdded(AdapterSpec(ModelId(name), ModelId("a"), info, 0.0)))
    made.add_node(report("n1", digests=["digest-of-a", "lora0", "lora1"]))
    return made


def call(made: World, name: str, *adapters: str | None) -> None:
    """Requests of these adapters, at once; they end when their instance is there."""
    for number, adapter in enumerate(adapters):
        names = {} if adapter is None else {"adapter_id": ModelId(adapter), "adapter_digest": Digest(adapter)}
        made.arrive(f"{name}{number}", **names)
    made.start_all()
    for number in range(len(adapters)):
        made.finish(f"{name}{number}")


def restart(made: World) -> str:
    """The only instance dies while nobody calls; a request without an adapter brings another one up."""
    made.crash(made.instances("a")[0])
    asked(made)
    made.sleep(1.0)
    call(made, f"back{made.now}-", None)
    return str(made.instances("a")[0].spec.instance_id)


def test_a_start_for_requests_of_adapters_is_told_them_with_it_the_first_first() -> None:
    made = one_node()
    for name in ("lora1", "lora0", "lora1"):
        made.arrive(f"r{len(made.open)}", adapter_id=ModelId(name), adapter_digest=Digest(name))
    kinds = [type(action) for action in made.actions if isinstance(action, (EnsureInstance, PrepareAdapter))]
    assert kinds == [EnsureInstance, PrepareAdapter, PrepareAdapter]
    name = str(made.instances("a")[0].spec.instance_id)
    assert asked(made) == [(name, "lora1"), (name, "lora0")]
    made.start_all()
    assert asked(made) == []


def test_an_instance_that_comes_back_reads_what_is_called_often_once_it_has_its_bytes() -> None:
    made = one_node()
    call(made, "r", "lora0", "lora0", "lora1", "lora1", "lora1", None)
    assert [digest for _, digest in asked(made)] == ["lora0", "lora1"], "with the start; later they are there"
    made.crash(made.instances("a")[0])
    made.arrive("back")
    (instance,) = made.instances("a")
    made.bind(instance)
    assert asked(made) == [], "its own bytes go first"
    made.load(instance)
    name = str(instance.spec.instance_id)
    assert asked(made) == [(name, "lora1"), (name, "lora0")], "the most asked for first"
    sent = [type(one) for one in made.actions if isinstance(one, (Dispatch, PrepareAdapter))]
    assert sent[-1] is Dispatch, "requests had gone before"
    made.sleep(60.0)
    made.arrive("again")
    assert asked(made) == [], "asked once, whether it did or not"


def test_rare_removed_replaced_and_missing_adapters_are_not_prepared() -> None:
    made = one_node()
    call(made, "r", "lora0", "lora1", "lora1")
    name = restart(made)
    assert asked(made) == [(name, "lora1")], "lora0 was called once"
    made.post(happened.AdapterRemoved(ModelId("lora1")))
    restart(made)
    assert asked(made) == []
    call(made, "s", "lora0", "lora0")
    replaced = AdapterSpec(ModelId("lora0"), ModelId("a"), checkpoint("new", 1000, CheckpointKind.ADAPTER), 0.0)
    made.post(happened.AdapterAdded(replaced))
    restart(made)
    assert asked(made) == [], "the old weights are called no more, the new ones were not yet"
    for number in range(3):
        made.arrive(f"t{number}", adapter_id=ModelId("lora2"), adapter_digest=Digest("lora2"))
        made.cancel(f"t{number}")
    restart(made)
    assert asked(made) == [], "its node does not have it"


@pytest.mark.parametrize(("apart_s", "is_asked"), [(60.0, True), (240.0, True), (600.0, False)])
def test_an_adapter_is_prepared_that_was_called_twice_within_five_minutes(apart_s: float, is_asked: bool) -> None:
    made = one_node()
    call(made, "r", "lora1")
    made.sleep(apart_s)
    call(made, "s", "lora1")
    name = restart(made)
    assert asked(made) == [(name, "lora1")] * is_asked


def test_few_at_a_time_and_none_when_switched_off() -> None:
    for limit, first in ((1, ["lora0"]), (0, [])):
        made = one_node(max_prepared_adapters=limit)
        call(made, "r", "lora0", "lora0", "lora0", "lora1", "lora1")
        name = restart(made)
        assert asked(made) == [(name, digest) for digest in first]
        made.sleep(made.config.adapter_homes_s)
        made.arrive("later")
        assert asked(made) == [(name, "lora1")] * limit, "the next ones an interval later"


def test_a_second_home_reads_the_hot_adapter_before_its_first_request_there() -> None:
    made = two_nodes(2)
    for turn in range(30):
        name = "lora1" if turn % 6 == 5 else "lora0"
        made.arrive(f"r{turn}", adapter_id=ModelId(name), adapter_digest=Digest(name))
        made.finish(f"r{turn}")
        made.sleep(0.5)
    asked_for = [one.instance_id for one in made.actions if isinstance(one, PrepareAdapter) and one.digest == "lora0"]
    used = [instance for instance, name in sent_to(made) if name == "lora0"]
    homes = {str(i.instance_id) for i in made.core.fleet.instances.values() if "lora0" in i.homes}
    assert len(homes) == 2
    assert asked_for == sorted(homes - {used[0]})
    assert asked_for[0] not in used, "nobody called it there yet"


def asked_at_second_home(made: World, name: str) -> list[str]:
    """Calls of lora0 and few of lora1: the instances that are asked to read lora0 before they are sent any of it."""
    made.actions.clear()
    for turn in range(30):
        adapter = "lora1" if turn % 6 == 5 else "lora0"
        made.arrive(f"{name}{turn}", adapter_id=ModelId(adapter), adapter_digest=Digest(adapter))
        made.finish(f"{name}{turn}")
        made.sleep(0.5)
    used = {instance for instance, adapter in sent_to(made) if adapter == "lora0"}
    return [instance for instance, digest in asked(made) if digest == "lora0" and instance not in used]


def is_removed_and_registered_again(made: World) -> None:
    made.post(happened.AdapterRemoved(ModelId("lora0")))
    info = checkpoint("lora0", 1000, CheckpointKind.ADAPTER)
    made.post(happened.AdapterAdded(AdapterSpec(ModelId("lora0"), ModelId("a"), info, 0.0)))


def is_not_called_for_an_hour(made: World) -> None:
    made.sleep(3600.0)
    made.arrive("plain")
    made.finish("plain")


def is_not_called_for_an_hour_but_another_is(made: World) -> None:
    for minute in range(60):
        made.sleep(60.0)
        made.arrive(f"m{minute}", adapter_id=ModelId("lora1"), adapter_digest=Digest("lora1"))
        made.finish(f"m{minute}")
    assert all("lora0" not in i.prepared for i in made.core.fleet.instances.values())


@pytest.mark.parametrize(
    "pause",
    [is_removed_and_registered_again, is_not_called_for_an_hour, is_not_called_for_an_hour_but_another_is],
)
def test_an_adapter_is_asked_for_again_once_it(pause: Callable[[World], None]) -> None:
    made = two_nodes(2)
    first = asked_at_second_home(made, "r")
    assert len(first) == 1
    pause(made)
    assert asked_at_second_home(made, "s") == first


def reported(made: World, *names: str) -> list[str]:
    """The first instance says which adapters it has; return which are believed to be there."""
    instance = next(iter(made.core.fleet.instances.values()))
    status = made.nodes[instance.node.node_id].instances[instance.instance_id].status()
    has = replace(status, adapter_digests=tuple(map(Digest, names)))
    made.post(happened.InstanceChanged(instance.node.node_id, has))
    return sorted(instance.adapters)


def test_an_adapter_that_an_engine_gave_up_is_not_believed_there_and_one_on_its_way_is() -> None:
    made = one_node()
    call(made, "r", None)
    assert reported(made, "lora0", "lora2") == ["lora0", "lora2"]
    made.arrive("waits", adapter_id=ModelId("lora1"), adapter_digest=Digest("lora1"))
    assert reported(made, "lora2") == ["lora1", "lora2"]
    assert reported(made, "lora1", "lora2") == ["lora1", "lora2"]
    assert reported(made) == ["lora1"], "its request waits until it is read again"
    made.finish("waits")
    assert reported(made) == []


def test_an_adapter_whose_read_failed_is_not_believed_there() -> None:
    made = one_node()
    call(made, "r", None)
    made.arrive("fails", adapter_id=ModelId("lora1"), adapter_digest=Digest("lora1"))
    made.finish("fails", ErrorInfo("adapter_mismatch", "rank differs"))
    assert reported(made) == []


def test_a_hot_adapter_that_an_engine_gave_up_is_asked_for_again_at_the_next_interval_and_then_no_more() -> None:
    made = one_node()
    call(made, "r", "lora1", "lora1", "lora1")
    name = str(made.instances("a")[0].spec.instance_id)
    asked(made)
    reported(made, "lora1")
    made.sleep(made.config.adapter_homes_s)
    made.arrive("plain0")
    assert asked(made) == [], "it is there"
    reported(made)
    made.arrive("plain1")
    assert asked(made) == [], "not at once: its place has just been taken by another"
    for turn, wanted in enumerate([[(name, "lora1")], [], []]):
        made.sleep(made.config.adapter_homes_s)
        made.arrive(f"later{turn}")
        assert asked(made) == wanted, "asked once, whether there was a place or not"

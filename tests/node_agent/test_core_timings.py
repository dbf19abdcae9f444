"""NodeCore and timings: they are said once, when the process is bound and the bytes are there, in whatever order."""

import pytest

from nearline.node_agent import events as ev
from nearline.node_agent.actions import (
    AcquireCheckpoint,
    BindEngine,
    DeleteCheckpoint,
    KillEngine,
    NodeAction,
    ReleaseCheckpoint,
    SendStatus,
    StartEngine,
    WakeAt,
)
from nearline.node_agent.core import NodeCore
from nearline.node_agent.types import CoreConfig, EngineId
from nearline.protocol import (
    CheckpointInfo,
    CheckpointKind,
    DeviceInfo,
    Digest,
    InstanceId,
    InstanceSpec,
    InstanceState,
    InstanceStatus,
    ModelId,
    Tier,
)

ID = InstanceId("i1")
BOUND = ev.EngineBound(EngineId(1), ID, 0.05, 1000)
CHECKPOINT = CheckpointInfo(
    Digest("d"), CheckpointKind.MODEL, 700, "llama", "L", "x", "float32", (), kv_bytes_per_token=64,
    max_context_tokens=128,
)  # fmt: skip
FILLED = ev.LeaseFilled(ID, 2.5, 700, Tier.SSD)


def starting() -> NodeCore:
    """A node with one warm process and one instance whose checkpoint is pinned."""
    core = NodeCore(CoreConfig((DeviceInfo(0, "cpu", "cpu", 1 << 36, 1),), 1, 1 << 26, 4, 2))
    core.on(ev.Woke(), 0.0)
    core.on(ev.EngineWarm(EngineId(1)), 1.0)
    core.on(ev.EnsureWished(InstanceSpec(ID, ModelId("m"), Digest("d")), CHECKPOINT), 2.0)
    core.on(ev.LeaseAcquired(ID), 2.0)
    return core


def test_a_start_goes_on_while_its_bytes_come_and_ends_when_they_do_not() -> None:
    config = CoreConfig((DeviceInfo(0, "cpu", "cpu", 1 << 36, 1),), 1, 1 << 26, 4, 2, bytes_timeout_s=50.0)
    core = NodeCore(config)
    core.on(ev.Woke(), 0.0)
    core.on(ev.EngineWarm(EngineId(1)), 0.0)
    core.on(ev.EnsureWished(InstanceSpec(ID, ModelId("m"), Digest("d")), CHECKPOINT), 0.0)
    core.on(ev.BytesMoved(ID), 40.0)
    core.on(ev.Woke(), 60.0)
    assert core.state(ID) is InstanceState.STARTING
    actions = core.on(ev.BytesMoved(ID), 80.0)
    assert WakeAt(130.0) in actions
    actions = core.on(ev.Woke(), 130.0)
    assert core.state(ID) is InstanceState.FAILED
    assert ReleaseCheckpoint(ID) in actions, "its slot is free, nobody waits for its bytes"
    (status,) = [action.status for action in actions if isinstance(action, SendStatus)]
    assert status.error is not None
    assert (status.error.code, "nothing of it came for 50 s" in status.error.message) == ("start_timeout", True)


@pytest.mark.parametrize("weight_bytes", [0, 1 << 36])
def test_only_a_device_with_memory_of_its_own_may_be_streamed_to(weight_bytes: int) -> None:
    device = DeviceInfo(0, "any", "any", 1 << 36, 1, weight_bytes)
    core = NodeCore(CoreConfig((device,), 1, 1 << 26, 4, 2))
    info = CheckpointInfo(Digest("d"), CheckpointKind.MODEL, 700, "llama", "L", "x", "float32", ())
    actions = core.on(ev.EnsureWished(InstanceSpec(ID, ModelId("m"), Digest("d")), info), 2.0)
    asked = [action.may_stream for action in actions if isinstance(action, AcquireCheckpoint)]
    assert asked == [weight_bytes > 0]


@pytest.mark.parametrize("is_imported_again", [False, True])
def test_a_delete_that_waits_for_a_drain_is_void_once_the_bytes_are_imported_again(is_imported_again: bool) -> None:
    core = starting()
    core.on(BOUND, 3.0)
    actions = core.on(ev.DeleteWished(Digest("d")), 4.0)
    if is_imported_again:
        actions += core.on(ev.DeleteUnwished(Digest("d")), 5.0)
    actions += core.on(ev.StopWished(ID, 0.0), 6.0)
    actions += core.on(ev.Drained(ID), 6.0)
    assert not any(isinstance(action, DeleteCheckpoint) for action in actions)
    actions = core.on(ev.EngineUnbound(EngineId(1)), 6.0)
    assert any(isinstance(action, DeleteCheckpoint) for action in actions) is not is_imported_again


@pytest.mark.parametrize("order", [(BOUND, FILLED), (FILLED, BOUND)])
def test_ready_comes_with_the_bind_and_timings_with_the_last_byte(order: tuple[ev.NodeEvent, ...]) -> None:
    core = starting()
    said: list[InstanceStatus] = []
    for event in order:
        said += [action.status for action in core.on(event, 3.0) if isinstance(action, SendStatus)]
    assert [status.state for status in said] == [InstanceState.READY] * (1 + (order[0] is BOUND))
    assert all(status.timings is None for status in said[:-1])
    timings = said[-1].timings
    assert timings is not None
    assert (timings.read_s, timings.read_bytes, timings.bind_s) == (2.5, 700, 0.05)
    assert core.statuses() == said[-1:]


def test_models_that_take_turns_in_a_slot_take_turns_in_the_same_processes() -> None:
    """The next model is wished for a moment after the last one has stopped; nothing is ended or started for that."""
    core = starting()
    actions = core.on(BOUND, 3.0)
    actions += core.on(ev.Woke(), 5.0)
    assert [type(action) for action in actions if isinstance(action, StartEngine)] == [StartEngine]
    core.on(ev.EngineWarm(EngineId(2)), 6.0)
    later: list[NodeAction] = []
    serving = EngineId(1)
    for turn in (1, 2, 3):
        at, next_id = 10.0 * turn, InstanceId(f"i{turn + 1}")
        core.on(ev.StopWished(InstanceId(f"i{turn}"), 0.0), at)
        core.on(ev.Drained(InstanceId(f"i{turn}")), at)
        later += core.on(ev.EngineUnbound(serving), at + 0.01)
        later += core.on(ev.EnsureWished(InstanceSpec(next_id, ModelId("m"), Digest("d")), CHECKPOINT), at + 0.02)
        later += core.on(ev.LeaseAcquired(next_id), at + 0.02)
        (serving,) = [action.engine_id for action in later if isinstance(action, BindEngine)][turn - 1 :]
        later += core.on(ev.EngineBound(serving, next_id, 0.05, 1000), at + 0.1)
        later += core.on(ev.Woke(), at + 5.0)
        core.check()
    assert not [action for action in later if isinstance(action, StartEngine | KillEngine)]

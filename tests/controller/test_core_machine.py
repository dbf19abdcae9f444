"""ControllerCore under random fleets and callers: whatever happens, invariants hold and every request ends once."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nearline.controller import events as happened
from nearline.controller.config import CoreConfig
from nearline.controller.core import ControllerCore
from nearline.controller.policy import dispatch
from nearline.protocol import Digest, InstanceState, ModelId, SloClass, TaskId
from nearline.protocol.errors import ErrorInfo, InstanceFailed, OutOfMemory
from tests.controller.fleets import FakeInstance, World, model, report, slo

MODELS = ("a", "b", "c")
STARTING = (InstanceState.PENDING, InstanceState.LOADING)
CONFIG = CoreConfig(max_held_per_model=6, max_held_total=9, start_timeout_s=120.0, dispatch_headroom=1)


class FleetMachine(RuleBasedStateMachine):
    """Rules are what the world may do; `World.post` checks invariants after every single event."""

    @initialize(slots=st.tuples(st.integers(1, 2), st.integers(1, 3)))
    def build(self, slots: tuple[int, int]) -> None:
        self.world = World(CONFIG)
        self.num_requests = 0
        for name in MODELS:
            spec = model(name, keep_alive_s=5.0, max_replicas=2, min_replicas=int(name == "c"))
            self.world.post(happened.ModelAdded(spec))
        digests = [f"digest-of-{name}" for name in MODELS] + [f"new-{name}" for name in MODELS]
        self.world.add_node(report("n1", slots[0], digests))
        self.world.add_node(report("n2", slots[1], digests[1:]))

    def pick_instance(self, data: st.DataObject, *states: InstanceState) -> FakeInstance | None:
        nodes = [node for node in self.world.nodes.values() if node.is_connected]
        found = [i for node in nodes for i in node.instances.values() if i.state in states]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(
        name=st.sampled_from(MODELS), kind=st.sampled_from(SloClass), deadline=st.none() | st.floats(0.5, 60),
        prefix=st.integers(0, 3),
    )  # fmt: skip
    def arrive(self, name: str, kind: SloClass, deadline: float | None, prefix: int) -> None:
        self.num_requests += 1
        wish = slo(deadline, slo_class=kind)
        self.world.arrive(f"r{self.num_requests:04d}", name, slo=wish, prefix_hash=prefix)

    @invariant()
    def nobody_waits_beside_a_free_place(self) -> None:
        """But behind a suspect, which waits for an idle instance and lets nobody past."""
        if not hasattr(self, "world"):
            return
        for record in self.world.core.fleet.models.values():
            has_room = any(dispatch.has_room(i, self.world.now, CONFIG) for i in record.instances.values())
            waiting = record.queue.requests()
            assert not (has_room and waiting) or any(dispatch.is_suspect(request, CONFIG) for request in waiting)

    @precondition(lambda self: self.world.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(list(self.world.open))))

    @precondition(lambda self: self.world.running())
    @rule(data=st.data(), does_fail=st.booleans(), has_token=st.booleans())
    def end_a_sequence(self, data: st.DataObject, does_fail: bool, has_token: bool) -> None:
        name = data.draw(st.sampled_from(list(self.world.running())))
        if has_token:
            self.world.token(name)
        self.world.finish(name, ErrorInfo.of(OutOfMemory("no block left")) if does_fail else None)

    @rule(data=st.data(), has_bytes=st.booleans())
    def start(self, data: st.DataObject, has_bytes: bool) -> None:
        instance = self.pick_instance(data, *STARTING)
        if instance is not None:
            self.world.bind(instance)
            if has_bytes:
                self.world.load(instance)

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        instance = self.pick_instance(data, InstanceState.READY)
        if instance is not None:
            self.world.load(instance)

    @rule(data=st.data(), says_so_first=st.booleans())
    def fail(self, data: st.DataObject, says_so_first: bool) -> None:
        """An engine dies; its node may end the sequences one by one before it reports the instance."""
        instance = self.pick_instance(data, *InstanceState)
        if instance is None:
            return
        if says_so_first and instance.state is InstanceState.READY:
            for name in list(instance.sequences):
                self.world.finish(name, ErrorInfo.of(InstanceFailed("engine died")))
        if instance in self.world.instances():
            instance.sequences.clear()
            self.world.crash(instance)

    @rule(data=st.data())
    def end_a_drain(self, data: st.DataObject) -> None:
        instance = self.pick_instance(data, InstanceState.DRAINING)
        if instance is not None:
            self.world.drain_ends(instance)

    @rule(data=st.data(), forgets=st.booleans())
    def break_or_mend_a_link(self, data: st.DataObject, forgets: bool) -> None:
        node = data.draw(st.sampled_from(list(self.world.nodes.values())))
        if node.is_connected and not forgets:
            self.world.disconnect(node)
        else:
            if forgets:
                node.instances.clear()
            self.world.connect(node)

    @rule()
    def report(self) -> None:
        for node in self.world.nodes.values():
            if node.is_connected:
                self.world.post(happened.NodeReported(node.full_report()))

    @rule(seconds=st.sampled_from((0.01, 0.5, 3.0, 20.0)))
    def sleep(self, seconds: float) -> None:
        self.world.sleep(seconds)

    @rule(name=st.sampled_from(MODELS), number=st.integers(1, 2), begins=st.booleans())
    def measure(self, name: str, number: int, begins: bool) -> None:
        """Ends may come alone or twice: a measurement may outlive the model it was of."""
        kind = happened.MeasurementBegan if begins else happened.MeasurementEnded
        self.world.post(kind(TaskId(f"profile-{number}"), Digest(f"digest-of-{name}")))

    @rule(name=st.sampled_from(MODELS), change=st.sampled_from(("new", "old", "gone")))
    def register(self, name: str, change: str) -> None:
        if change == "gone":
            self.world.post(happened.ModelRemoved(ModelId(name)))
        else:
            digest = f"new-{name}" if change == "new" else f"digest-of-{name}"
            self.world.post(happened.ModelAdded(model(name, digest, keep_alive_s=5.0, max_replicas=2)))

    def teardown(self) -> None:
        """Once the world behaves, everything that is open ends soon; then the journal replays to the same actions."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for node in world.nodes.values():
            if not node.is_connected:
                world.connect(node)
        for _ in range(300):
            for instance in world.instances():
                if instance.state is InstanceState.DRAINING:
                    world.drain_ends(instance)
            world.start_all()
            for name in list(world.running()):
                world.token(name)
                world.finish(name)
            if not world.open:
                break
            world.sleep(0.5)
        assert not world.open, "requests that nobody ends"
        assert len(world.ended) == self.num_requests
        again = ControllerCore(CONFIG)
        replayed = [action for event, now in world.journal for action in again.on(event, now)]
        assert replayed == world.actions


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.slow
def test_the_same_for_very_many_histories() -> None:
    class Long(FleetMachine):
        pass

    case = Long.TestCase
    case.settings = settings(max_examples=1500, stateful_step_count=80, deadline=None)
    case("runTest").runTest()

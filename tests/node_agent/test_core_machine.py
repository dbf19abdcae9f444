"""NodeCore under random events: every wish settles, pins are given back once, slots are never exceeded."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nearline.node_agent import actions as act
from nearline.node_agent import events as ev
from nearline.node_agent.core import NodeCore
from nearline.node_agent.lifecycle import TRANSITIONS
from nearline.node_agent.types import CoreConfig, EngineId
from nearline.protocol import (
    CheckpointInfo,
    CheckpointKind,
    DeviceInfo,
    Digest,
    InstanceId,
    InstanceSpec,
    InstanceState,
    ModelId,
    Tier,
)
from nearline.protocol.errors import ErrorInfo

NUM_SLOTS, NUM_DEVICES = 2, 2
ERROR = ErrorInfo("checkpoint_corrupt", "chunk 3 is not what was imported")


def checkpoint(digest: str) -> CheckpointInfo:
    return CheckpointInfo(
        Digest(digest), CheckpointKind.MODEL, 1 << 20, "llama", "LlamaForCausalLM", "src", "bfloat16", (),
        max_context_tokens=512, kv_bytes_per_token=1024,
    )  # fmt: skip


class NodeMachine(RuleBasedStateMachine):
    """Plays the runtime, the store and the engine processes, all of which may fail whenever they answer."""

    def __init__(self) -> None:
        super().__init__()
        devices = tuple(DeviceInfo(i, "cpu", f"cpu{i}", 1 << 34, NUM_SLOTS) for i in range(NUM_DEVICES))
        self.core = NodeCore(CoreConfig(devices, num_prewarmed=1, kv_bytes=1 << 30, max_running=8, num_cores=2))
        self.now = 0.0
        self.num_wished = 0
        self.states: dict[InstanceId, InstanceState] = {}
        self.stopped: set[InstanceId] = set()
        self.pins: set[InstanceId] = set()
        self.unanswered_leases: list[InstanceId] = []
        self.reading: list[InstanceId] = []
        self.starting: list[EngineId] = []
        self.binding: dict[EngineId, InstanceId] = {}
        self.unbinding: list[EngineId] = []
        self.mapped: dict[EngineId, InstanceId] = {}
        self.alive: set[EngineId] = set()
        self.dying: list[EngineId] = []
        self.draining: list[InstanceId] = []
        self.deleted: list[Digest] = []
        self.wake_at: float | None = None
        self.post(ev.Woke())

    # ---- the runtime's part ----

    def post(self, event: ev.NodeEvent) -> None:
        for action in self.core.on(event, self.now):
            getattr(self, f"do_{type(action).__name__.lower()}")(action)
        self.core.check()

    def do_startengine(self, action: act.StartEngine) -> None:
        self.starting.append(action.engine_id)
        self.alive.add(action.engine_id)

    def do_bindengine(self, action: act.BindEngine) -> None:
        instance_id = action.spec.instance_id
        assert instance_id in self.pins
        assert instance_id not in self.unanswered_leases
        assert action.engine_id not in self.mapped
        assert 0 < action.kv_bytes <= (1 << 30) // NUM_SLOTS
        self.binding[action.engine_id] = self.mapped[action.engine_id] = instance_id

    @rule(data=st.data())
    def an_action_breaks(self, data: st.DataObject) -> None:
        if self.states:
            self.post(ev.ActionFailed(data.draw(st.sampled_from(sorted(self.states))), ERROR))

    def do_unbindengine(self, action: act.UnbindEngine) -> None:
        self.unbinding.append(action.engine_id)

    def do_killengine(self, action: act.KillEngine) -> None:
        assert action.engine_id not in self.dying, "killed twice"
        self.dying.append(action.engine_id)

    def do_acquirecheckpoint(self, action: act.AcquireCheckpoint) -> None:
        assert action.instance_id not in self.pins
        self.pins.add(action.instance_id)
        self.unanswered_leases.append(action.instance_id)

    def do_releasecheckpoint(self, action: act.ReleaseCheckpoint) -> None:
        assert action.instance_id in self.pins, "released twice"
        assert action.instance_id not in self.mapped.values(), "released under a process that maps it"
        self.pins.remove(action.instance_id)
        self.unanswered_leases = [i for i in self.unanswered_leases if i != action.instance_id]

    def do_sendstatus(self, action: act.SendStatus) -> None:
        status = action.status
        before = self.states.get(status.instance_id)
        if before is not None and before is not status.state:
            assert status.state in TRANSITIONS[before].values(), f"{before} to {status.state}"
        assert (status.state is InstanceState.FAILED) == (status.error is not None)
        self.states[status.instance_id] = status.state

    def do_awaitdrain(self, action: act.AwaitDrain) -> None:
        self.draining.append(action.instance_id)

    def do_failsequences(self, action: act.FailSequences) -> None:
        assert action.error.message

    def do_abortsequences(self, action: act.AbortSequences) -> None: ...

    def do_deletecheckpoint(self, action: act.DeleteCheckpoint) -> None:
        self.deleted.append(action.digest)

    def do_wakeat(self, action: act.WakeAt) -> None:
        self.wake_at = action.at

    # ---- what may happen ----

    @rule(
        device=st.integers(0, NUM_DEVICES),
        digest=st.sampled_from("abc"),
        is_stored=st.sampled_from([True] * 4 + [False]),
    )
    def wish(self, device: int, digest: str, is_stored: bool) -> None:
        self.num_wished += 1
        spec = InstanceSpec(InstanceId(f"i{self.num_wished}"), ModelId("m"), Digest(digest), device)
        self.post(ev.EnsureWished(spec, checkpoint(digest) if is_stored else None))
        assert spec.instance_id in self.states

    @precondition(lambda self: self.states)
    @rule(data=st.data(), drain_s=st.sampled_from([0.0, 5.0]))
    def stop(self, data: st.DataObject, drain_s: float) -> None:
        instance_id = data.draw(st.sampled_from(sorted(self.states)))
        self.stopped.add(instance_id)
        self.post(ev.StopWished(instance_id, drain_s))

    @rule(digest=st.sampled_from("abc"))
    def delete(self, digest: str) -> None:
        self.post(ev.DeleteWished(Digest(digest)))

    @rule()
    def lose_link(self) -> None:
        self.post(ev.LinkLost())

    @precondition(lambda self: self.unanswered_leases)
    @rule(is_refused=st.sampled_from([False] * 4 + [True]))
    def answer_lease(self, is_refused: bool) -> None:
        instance_id = self.unanswered_leases.pop(0)
        if is_refused:
            self.pins.remove(instance_id)
            self.post(ev.LeaseRefused(instance_id, ERROR))
        else:
            self.reading.append(instance_id)
            self.post(ev.LeaseAcquired(instance_id))

    @precondition(lambda self: self.unanswered_leases)
    @rule()
    def fetch_on(self) -> None:
        self.post(ev.BytesMoved(self.unanswered_leases[0]))

    @precondition(lambda self: self.reading)
    @rule(is_broken=st.sampled_from([False] * 4 + [True]))
    def end_read(self, is_broken: bool) -> None:
        instance_id = self.reading.pop(0)
        self.post(ev.LeaseBroken(instance_id, ERROR) if is_broken else ev.LeaseFilled(instance_id, 1.0, 9, Tier.SSD))

    @precondition(lambda self: self.starting)
    @rule(data=st.data())
    def warm(self, data: st.DataObject) -> None:
        engine_id = data.draw(st.sampled_from(self.starting))
        self.starting.remove(engine_id)
        self.post(ev.EngineWarm(engine_id))

    @precondition(lambda self: self.binding)
    @rule(data=st.data(), is_bad=st.sampled_from([False] * 4 + [True]))
    def bind(self, data: st.DataObject, is_bad: bool) -> None:
        engine_id = data.draw(st.sampled_from(sorted(self.binding)))
        instance_id = self.binding.pop(engine_id)
        bound = ev.EngineBound(engine_id, instance_id, 0.01, 4096)
        self.post(ev.EngineBindFailed(engine_id, instance_id, ERROR) if is_bad else bound)

    @precondition(lambda self: self.unbinding)
    @rule()
    def unbind(self) -> None:
        engine_id = self.unbinding.pop(0)
        if engine_id not in self.dying:
            self.mapped.pop(engine_id)
        self.post(ev.EngineUnbound(engine_id))

    @precondition(lambda self: self.draining)
    @rule()
    def drain(self) -> None:
        self.post(ev.Drained(self.draining.pop(0)))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.exit(data.draw(st.sampled_from(sorted(self.alive))))

    @precondition(lambda self: self.dying)
    @rule()
    def die(self) -> None:
        self.exit(self.dying[0])

    @rule(seconds=st.sampled_from([0.1, 3.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.wake_at is not None and self.wake_at <= self.now:
            self.post(ev.Woke())

    def exit(self, engine_id: EngineId) -> None:
        self.alive.remove(engine_id)
        self.mapped.pop(engine_id, None)
        self.binding.pop(engine_id, None)
        self.starting = [e for e in self.starting if e != engine_id]
        self.unbinding = [e for e in self.unbinding if e != engine_id]
        self.dying = [e for e in self.dying if e != engine_id]
        self.post(ev.EngineExited(engine_id, "signal 9"))

    # ---- what must hold ----

    @invariant()
    def no_more_processes_than_wanted(self) -> None:
        assert len(self.mapped) <= NUM_SLOTS * NUM_DEVICES
        assert len(self.alive) - len(self.dying) <= NUM_DEVICES * (NUM_SLOTS + 1 + NUM_SLOTS)

    def teardown(self) -> None:
        for _ in range(400):
            if not self.answer_all():
                self.now = max(self.now, self.wake_at or 0.0) + 0.001
                self.post(ev.Woke())
        for instance_id, state in self.states.items():
            if instance_id in self.stopped:
                assert state in ("stopped", "failed"), f"{instance_id} wished to stop is {state}"
            else:
                assert state in ("pending", "ready", "failed"), f"{instance_id} never settled: {state}"
        ready = sum(s is InstanceState.READY for s in self.states.values())
        assert len(self.pins) == ready == len(self.mapped)
        if "pending" in self.states.values():
            assert ready >= NUM_SLOTS, "an instance waits though a slot is free"

    def answer_all(self) -> bool:
        """Let every process and read answer well once; tell whether there was any."""
        waiting = [self.unanswered_leases, self.reading, self.starting, self.unbinding, self.draining, self.dying]
        if self.dying:
            self.exit(self.dying[0])
        elif self.unanswered_leases:
            self.reading.append(self.unanswered_leases.pop(0))
            self.post(ev.LeaseAcquired(self.reading[-1]))
        elif self.reading:
            self.post(ev.LeaseFilled(self.reading.pop(0), 0.0, 0, Tier.DRAM))
        elif self.starting:
            self.post(ev.EngineWarm(self.starting.pop(0)))
        elif self.binding:
            engine_id, instance_id = self.binding.popitem()
            self.post(ev.EngineBound(engine_id, instance_id, 0.01, 4096))
            return True
        elif self.unbinding:
            self.unbind()
        elif self.draining:
            self.post(ev.Drained(self.draining.pop(0)))
        return any(waiting)


NodeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestNodeCoreUnderRandomEvents = NodeMachine.TestCase

"""Between controller and engine: adapters first, one end each, nothing after an end."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from nearline.node_agent.relay import Relay, RelayPorts
from nearline.node_agent.types import EngineId
from nearline.protocol import (
    Digest,
    Extent,
    FinishReason,
    InstanceId,
    InstanceState,
    ModelId,
    Request,
    RequestId,
    SequenceUpdate,
)
from nearline.protocol.errors import ErrorInfo, ModelNotFound
from nearline.protocol.frames import (
    Abort,
    AdapterBytes,
    AdapterLoaded,
    LoadAdapter,
    PrepareAdapter,
    StepDone,
    Submit,
    UnloadAdapter,
    Yield,
)

ENGINE, INSTANCE = EngineId(1), InstanceId("i")


class Ends:
    """Both ends of a relay, as lists of what they were told."""

    def __init__(self) -> None:
        self.engine: list[Any] = []
        self.controller: list[Any] = []
        self.drained: list[InstanceId] = []
        self.in_dram: dict[Digest, AdapterBytes] = {}
        ports = RelayPorts(
            lambda _, m: self.engine.append(m),
            self.controller.append,
            self.directory,
            self.drained.append,
            lambda _, digest: self.in_dram.get(digest),
        )
        self.relay = Relay(ports)
        self.relay.bind(ENGINE, INSTANCE)

    def directory(self, digest: Digest) -> Path:
        if digest == "gone":
            raise ModelNotFound("checkpoint gone is not here")
        return Path("/store") / digest

    def submit(self, request_id: str, attempt: int = 0, adapter: str | None = None) -> Submit:
        digest = Digest(adapter) if adapter else None
        request = Request(RequestId(request_id), ModelId("m"), (1,), adapter_digest=digest)
        message = Submit(INSTANCE, request, attempt)
        self.relay.submit(message, is_ready=True)
        return message

    def step(self, request_id: str, attempt: int = 0, finish: FinishReason | None = None) -> None:
        update = SequenceUpdate(RequestId(request_id), attempt, (7,), finish)
        self.relay.step_done(ENGINE, StepDone((update,), 1, 2, 3))

    def heard(self) -> list[SequenceUpdate]:
        return [u for message in self.controller for u in message.updates]


def test_an_adapter_is_loaded_once_before_its_first_sequence() -> None:
    ends = Ends()
    first, second = ends.submit("a", adapter="lora"), ends.submit("b", adapter="lora")
    assert ends.engine == [ASKED, first, second]


def test_bytes_that_are_in_dram_are_lent_with_the_first_load_and_for_nothing_read_ahead() -> None:
    ends = Ends()
    ends.in_dram = {LORA: AdapterBytes(LORA, (Extent(4096, 10),), 7)}
    first = ends.submit("a", adapter="lora")
    assert ends.engine == [replace(ASKED, lent=ends.in_dram[LORA]), first]
    ends = Ends()
    ends.in_dram = {LORA: AdapterBytes(LORA, (Extent(4096, 10),), 7)}
    prepare(ends)
    ends.submit("a", adapter="lora")
    assert ends.engine[:2] == [AHEAD, ASKED], "the engine asks when it reads"


def test_an_adapter_that_failed_or_was_unloaded_is_loaded_again() -> None:
    ends = Ends()
    ends.submit("a", adapter="lora")
    ends.relay.adapter_loaded(ENGINE, AdapterLoaded(Digest("lora"), 0.0, 0, ErrorInfo("adapter_mismatch", "rank")))
    ends.submit("b", adapter="lora")
    assert ends.relay.unload_adapter(Digest("lora")) == [INSTANCE]
    ends.submit("c", adapter="lora")
    kinds = [type(m) for m in ends.engine]
    assert kinds == [LoadAdapter, Submit, LoadAdapter, Submit, UnloadAdapter, LoadAdapter, Submit]


def test_an_adapter_that_the_engine_gave_up_is_asked_for_again_with_its_bytes_or_ahead() -> None:
    ends = Ends()
    ends.in_dram = {LORA: AdapterBytes(LORA, (Extent(4096, 10),), 7)}
    ends.submit("a", adapter="lora")
    prepare(ends)
    assert [type(m) for m in ends.engine] == [LoadAdapter, Submit]
    assert ends.relay.adapter_gone(ENGINE, LORA) == INSTANCE
    second = ends.submit("b", adapter="lora")
    assert ends.engine[2:] == [replace(ASKED, lent=ends.in_dram[LORA]), second]
    ends.relay.adapter_gone(ENGINE, LORA)
    prepare(ends)
    prepare(ends)
    assert ends.engine[4:] == [AHEAD]


def test_an_adapter_given_up_is_still_let_go_of_and_what_was_unloaded_is_not_remembered_for_it() -> None:
    ends = Ends()
    ends.submit("a", adapter="lora")
    ends.relay.adapter_gone(ENGINE, LORA)
    assert ends.relay.unload_adapter(LORA) == [INSTANCE]
    ends.relay.adapter_gone(ENGINE, LORA)
    assert ends.relay.unload_adapter(LORA) == []
    assert ends.relay.adapter_gone(EngineId(9), LORA) is None


def test_a_missing_adapter_is_an_answer_and_never_reaches_the_engine() -> None:
    ends = Ends()
    ends.submit("a", adapter="gone")
    (answer,) = ends.heard()
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.error is not None
    assert answer.error.code == "model_not_found"
    assert not ends.engine


def test_nothing_follows_an_end_or_an_abort() -> None:
    ends = Ends()
    ends.submit("a")
    ends.step("a", finish=FinishReason.STOP)
    ends.step("a")
    ends.submit("b")
    ends.relay.abort(Abort(INSTANCE, RequestId("b")))
    ends.step("b", finish=FinishReason.CANCELLED)
    assert [(u.request_id, u.finish_reason) for u in ends.heard()] == [("a", "stop")]


def test_a_newer_attempt_replaces_the_older_one() -> None:
    ends = Ends()
    ends.submit("a", attempt=0)
    ends.submit("a", attempt=1)
    ends.step("a", attempt=0)
    ends.step("a", attempt=1)
    assert [u.attempt for u in ends.heard()] == [1]
    assert [type(m) for m in ends.engine] == [Submit, Abort, Submit]


def test_drained_is_said_once_when_the_last_sequence_ends() -> None:
    ends = Ends()
    ends.submit("a")
    ends.submit("b")
    ends.relay.await_drain(INSTANCE)
    ends.step("a", finish=FinishReason.STOP)
    assert ends.drained == []
    ends.relay.abort(Abort(INSTANCE, RequestId("b")))
    assert ends.drained == [INSTANCE]


def test_a_lost_link_ends_all_sequences_silently() -> None:
    ends = Ends()
    ends.submit("a")
    ends.submit("b")
    ends.relay.abort_all()
    assert [m.request_id for m in ends.engine if isinstance(m, Abort)] == ["a", "b"]
    ends.step("a", finish=FinishReason.CANCELLED)
    assert not ends.heard()


def test_a_failed_instance_answers_for_each_of_its_sequences() -> None:
    ends = Ends()
    ends.submit("a", attempt=3)
    ends.submit("b")
    ends.relay.fail(INSTANCE, ErrorInfo("instance_failed", "signal 9"))
    assert [(u.request_id, u.attempt, u.finish_reason) for u in ends.heard()] == [("a", 3, "error"), ("b", 0, "error")]


def test_a_sequence_is_told_to_give_way_while_it_is_there_and_goes_on_being_heard() -> None:
    ends = Ends()
    ends.submit("a")
    ends.relay.yield_place(Yield(INSTANCE, RequestId("a")))
    assert ends.engine[-1] == Yield(INSTANCE, RequestId("a"))
    ends.step("a")
    ends.step("a", finish=FinishReason.STOP)
    assert len(ends.heard()) == 2
    ends.relay.yield_place(Yield(INSTANCE, RequestId("a")))
    ends.relay.yield_place(Yield(InstanceId("unknown"), RequestId("a")))
    assert sum(isinstance(message, Yield) for message in ends.engine) == 1


LORA = Digest("lora")
ASKED = LoadAdapter(LORA, "/store/lora", is_pooled=True)
AHEAD = replace(ASKED, is_ahead=True)


def prepare(ends: Ends, state: str | None = "ready", digest: str = "lora", instance_id: str = INSTANCE) -> None:
    message = PrepareAdapter(InstanceId(instance_id), Digest(digest))
    ends.relay.prepare_adapter(message, None if state is None else InstanceState(state))


def test_an_adapter_is_loaded_ahead_once_and_asked_for_by_its_first_sequence() -> None:
    ends = Ends()
    prepare(ends)
    prepare(ends)
    assert ends.engine == [AHEAD]
    first, second = ends.submit("a", adapter="lora"), ends.submit("b", adapter="lora")
    prepare(ends)
    assert ends.engine == [AHEAD, ASKED, first, second]


def test_an_instance_that_is_not_bound_yet_loads_ahead_once_it_is() -> None:
    for state in ("pending", "starting"):
        ends = Ends()
        ends.relay.unbind(ENGINE)
        prepare(ends, state)
        prepare(ends, state)
        ends.relay.bind(ENGINE, INSTANCE)
        assert ends.engine == []
        ends.relay.bind_sent(INSTANCE)
        ends.relay.bind_sent(INSTANCE)
        assert ends.engine == [AHEAD]


def test_what_is_unknown_stopping_or_ended_prepares_nothing() -> None:
    ends = Ends()
    prepare(ends, digest="gone")
    prepare(ends, None, instance_id="unknown")
    prepare(ends, "draining")
    prepare(ends, "pending", instance_id="second")
    ends.relay.ended(InstanceId("second"))
    ends.relay.bind_sent(InstanceId("second"))
    assert (ends.engine, ends.controller) == ([], [])


def test_an_adapter_removed_between_the_wish_and_the_bind_is_not_loaded() -> None:
    ends = Ends()
    prepare(ends, "pending")
    prepare(ends, "ready", "other")
    assert ends.relay.unload_adapter(LORA) == []
    assert ends.relay.unload_adapter(Digest("other")) == [INSTANCE]
    ends.relay.bind_sent(INSTANCE)
    assert [type(message) for message in ends.engine] == [LoadAdapter, UnloadAdapter]
    ends.submit("a", adapter="other")
    assert ends.engine[2] == LoadAdapter(Digest("other"), "/store/other", is_pooled=True)

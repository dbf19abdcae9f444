"""The calibration on a run that is known to the last microsecond: one that was simulated in the first place."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import pytest

from benchmarks.evidence import calibration_page, page
from benchmarks.evidence.calibration_journal import SIX, Lived, lived_of
from benchmarks.evidence.calibration_machine import machine_of, profile_only, simulated
from nearline.controller import ControllerCore, CoreConfig, Event
from nearline.protocol import ModelId, ModelSpec, NodeId, StepProfile, StepTimeModel
from nearline.simulator import (
    Arrival,
    CostModel,
    Machine,
    SimulatedModel,
    SimulatedNode,
    Simulation,
    add_models,
    stepped,
)

PROFILE = StepTimeModel(
    prefill_base_s=0.008, prefill_per_token_s=4e-4, prefill_per_square_s=0.0,
    decode_base_s=0.006, decode_per_context_s=0.0, decode_per_sequence_s=5e-4,
)  # fmt: skip
STREAMING = StepTimeModel(
    prefill_base_s=0.011, prefill_per_token_s=4e-4, prefill_per_square_s=0.0,
    decode_base_s=0.0075, decode_per_context_s=0.0, decode_per_sequence_s=8e-4,
)  # fmt: skip
"""What steps take while tokens stream to callers: more than a profile, which streams none, can know."""
MODELS = ("m1", "m2", "m3")
WARM_UP_S, LOAD_S = 400.0, 600.0


class Recording(Simulation):
    """Keeps every event as a journal does."""

    def __init__(self, core: ControllerCore, models: list[ModelSpec], nodes: list[SimulatedNode]) -> None:
        self.events: list[tuple[Event, float]] = []
        super().__init__(core, models, nodes)

    def post(self, event: Event) -> None:
        self.events.append((event, self.now))
        super().post(event)


def arrivals() -> Iterator[Arrival]:
    stream, turns = Random(1), count(1)
    for turn in turns:
        name, at = ModelId(MODELS[turn % 3]), 10.0 * turn
        if at > 180.0:
            break
        yield Arrival(at, name, 40, 4)
        yield Arrival(at + 1.15, name, 40, 4)
        yield Arrival(at + 2.0, name, 60, 30)
        yield Arrival(at + 4.0, name, 50, 30)
        yield from (Arrival(at + 6.0, name, 40, 30) for _ in range(SIX))
    for at, one, other in ((200.0, "m1", "m2"), (210.0, "m2", "m1"), (220.0, "m3", "m1")):
        yield from (Arrival(at, ModelId(other), 40, 150), Arrival(at + 0.3, ModelId(one), 40, 30))
    at = 230.0
    while (at := at + stream.expovariate(0.66)) < WARM_UP_S + LOAD_S:
        name = ModelId(stream.choice(MODELS))
        yield Arrival(at, name, round(stream.lognormvariate(3.8, 0.7)), max(2, round(stream.lognormvariate(3.2, 0.6))))


def run(num_slots: int = 1, slowdown_beside: float = 0.0) -> Lived:
    """What a machine of known costs does in 1000 seconds, 600 of them the load."""
    cost = CostModel(hop_s=0.004, stop_s=0.015, bind_s=0.02, dram_bytes_per_s=1e13, process_s=1.5, max_running=32)
    machine = Machine(
        cost=cost, num_slots=num_slots, dram_bytes=10**10, frame_bytes=1 << 24, slowdown_beside=slowdown_beside
    )
    pairs = [
        pair
        for index, name in enumerate(MODELS)
        for pair in add_models(
            name, 1, SimulatedModel(num_bytes=10**8, steps=STREAMING, binds_s=(0.02, 0.01 * index), settle_s=0.2)
        )
    ]
    models = {spec.checkpoint.digest: model for spec, model in pairs}
    node = SimulatedNode(NodeId("n"), machine, models, stepped)
    simulation = Recording(ControllerCore(CoreConfig()), [spec for spec, _ in pairs], [node])
    simulation.run(arrivals())
    profiles = {
        str(spec.model_id): StepProfile(spec.checkpoint.digest, "cpu", 2, PROFILE, 0.0, 0.0, 1, 1e9, 0.0)
        for spec, _ in pairs
    }
    return lived_of(CoreConfig(), simulation.events, profiles, WARM_UP_S)


@pytest.fixture(scope="module")
def lived() -> Lived:
    return run()


def test_what_the_warm_up_shows_is_what_the_machine_costs(lived: Lived) -> None:
    machine, models = machine_of(lived)
    assert machine.cost.stop_s == pytest.approx(0.015, abs=0.001)
    for model in models.values():
        assert model.settle_s == pytest.approx(0.2, abs=0.01)
        assert model.steps is not None
        first_s = machine.cost.hop_s + model.steps.prefill_s(50)
        assert first_s == pytest.approx(0.004 + STREAMING.prefill_s(50), rel=0.02), "wherever it is spent"
        assert model.steps.decode_s(1, 50) == pytest.approx(STREAMING.decode_s(1, 50), rel=0.02)


def test_cores_that_two_slots_share_are_found_from_pairs_of_requests() -> None:
    lived = run(num_slots=2, slowdown_beside=0.5)
    machine, models = machine_of(lived)
    assert machine.slowdown_beside == pytest.approx(0.5, abs=0.05)
    live = lived.run()
    assert calibration_page.is_met(live, simulated(lived, machine, models))
    alone = simulated(lived, replace(machine, slowdown_beside=0.0), models)
    assert live.measured()["tpot"] > 1.03 * alone.measured()["tpot"]


def test_nothing_of_the_load_is_looked_at(lived: Lived) -> None:
    before = [answer for answer in lived.answers if answer.arrived_at < lived.begun_at]
    starts = [start for start in lived.starts if start.loading_at < lived.begun_at]
    blind = Lived(lived.config, lived.specs, lived.profiles, lived.begun_at, lived.report, before, starts)
    assert machine_of(blind) == machine_of(lived)


def test_the_machine_as_measured_agrees_with_the_run_and_the_profile_alone_does_not(lived: Lived) -> None:
    live = lived.run()
    assert len(live.timings) > 300
    assert live.measured()["swaps"] > 50
    assert calibration_page.is_met(live, simulated(lived, *machine_of(lived)))
    errors = calibration_page.errors(live, simulated(lived, *machine_of(lived)))
    assert max(abs(error) for error in errors.values()) < 0.03
    assert not calibration_page.is_met(live, simulated(lived, *profile_only(lived)))


def test_the_page_says_what_was_compared(lived: Lived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    text = calibration_page.write(lived, "command").read_text()
    assert "agreed: yes" in text
    assert f"{len(lived.run().timings)} requests" in text


def test_a_machine_that_others_used_is_no_evidence(
    lived: Lived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    quiet, disturbed = (
        calibration_page.write(replace(lived, others=(0.01, part)), "").read_text() for part in (0.0, 0.4)
    )
    assert "it was not quiet" in disturbed
    assert "it was not quiet" not in quiet

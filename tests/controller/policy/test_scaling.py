"""How many replicas, and how long idle ones stay: tables."""

import pytest

from nearline.controller.config import CoreConfig
from nearline.controller.policy.scaling import backoff_s, expires_at, has_spare, residence_ends_at, wanted
from nearline.controller.queues import RequestRecord
from nearline.controller.state import InstanceRecord, ModelRecord, NodeRecord
from nearline.protocol import InstanceId, InstanceSpec, InstanceState, TaskId
from tests.controller.fleets import info, model, report

CONFIG = CoreConfig(scale_out_factor=1.0)


def record(waiting: int, states: str, **settings: object) -> ModelRecord:
    """States: R ready (8 places), L loading, D draining."""
    made = ModelRecord(model("a", **settings))
    for n in range(waiting):
        made.queue.push(RequestRecord(info(f"r{n}"), made.digest, n, 0.0, 0.0))
    for n, letter in enumerate(states):
        spec = InstanceSpec(InstanceId(f"i{n}"), made.spec.model_id, made.digest)
        instance = InstanceRecord(spec, NodeRecord(report()), made, 0.0, max_running=8, idle_since=100.0, loaded_at=2.0)
        instance.state = InstanceState.LOADING if letter == "L" else InstanceState.READY
        instance.is_stopping = letter == "D"
        made.instances[instance.instance_id] = instance
    return made


@pytest.mark.parametrize(
    ("waiting", "states", "limits", "expected", "reason"),
    [
        (0, "", (0, 1), 0, "enough"),
        (1, "", (0, 1), 1, "1 waiting, no replica"),
        (1, "D", (0, 1), 1, "1 waiting, no replica"),
        (1, "", (2, 4), 2, "1 waiting, no replica"),
        (0, "", (2, 4), 2, "0 of at least 2 replicas"),
        (8, "R", (0, 4), 1, "enough"),
        (9, "R", (0, 4), 2, "9 waiting, 1 replicas run 8 at once"),
        (9, "R", (0, 1), 1, "enough"),
        (99, "RL", (0, 4), 2, "enough"),
        (16, "RR", (0, 4), 2, "enough"),
        (17, "RR", (0, 4), 3, "17 waiting, 2 replicas run 16 at once"),
        (0, "RRR", (0, 4), 3, "enough"),
    ],
)
def test_wanted_replicas(waiting: int, states: str, limits: tuple[int, int], expected: int, reason: str) -> None:
    found = wanted(record(waiting, states, min_replicas=limits[0], max_replicas=limits[1]), CONFIG)
    assert (found.num_replicas, found.reason) == (expected, reason)


@pytest.mark.parametrize(
    ("states", "keep_alive_s", "minimum", "expected"),
    [
        ("R", 30.0, 0, 130.0),
        ("R", 0.0, 0, 100.0),
        ("R", -1.0, 0, None),
        ("R", 30.0, 1, None),
        ("RR", 30.0, 1, 130.0),
        ("D", 30.0, 0, None),
        ("L", 30.0, 0, None),
    ],
)
def test_idle_instances_expire(states: str, keep_alive_s: float, minimum: int, expected: float | None) -> None:
    made = record(0, states, keep_alive_s=keep_alive_s, min_replicas=minimum)
    assert expires_at(made.instances[InstanceId("i0")]) == expected


def test_nothing_expires_and_nothing_is_spare_while_steps_are_measured() -> None:
    made = record(0, "RR", keep_alive_s=30.0)
    assert has_spare(made, 2, 100.0, CONFIG)
    made.measurements[TaskId("profile-1")] = None
    assert not has_spare(made, 2, 100.0, CONFIG)
    assert expires_at(made.instances[InstanceId("i0")]) is None
    made.retire()
    assert expires_at(made.instances[InstanceId("i0")]) == 100.0


def test_an_instance_of_a_removed_model_expires_as_soon_as_it_is_idle() -> None:
    made = record(0, "R", keep_alive_s=-1.0)
    made.retire()
    assert expires_at(made.instances[InstanceId("i0")]) == 100.0


def test_residence_is_a_multiple_of_the_start_and_at_most_the_wait_bound() -> None:
    instance = record(0, "R").instances[InstanceId("i0")]
    assert residence_ends_at(instance, CoreConfig(residence_factor=4.0), 10.0) == 2.0 + 4 * 2.0
    assert residence_ends_at(instance, CoreConfig(residence_factor=9.0), 10.0) == 2.0 + 10.0


def test_pauses_double_up_to_their_bound() -> None:
    config = CoreConfig(start_backoff_s=0.5, start_backoff_max_s=3.0)
    assert [backoff_s(n, config) for n in (1, 2, 3, 4, 99)] == [0.5, 1.0, 2.0, 3.0, 3.0]

"""Start-up times and waits, by hand."""

from random import Random
from typing import Any

import pytest

from nearline.controller.estimate import ResumeCost, bytes_by_tier, generated_tokens, retry_after_s, startup, taken_s
from nearline.controller.queues import RequestRecord
from nearline.controller.state import InstanceRecord, ModelRecord, NodeRecord
from nearline.protocol import (
    Digest,
    InstanceId,
    InstanceSpec,
    InstanceState,
    InstanceStatus,
    Residency,
    Tier,
    TierBandwidth,
)
from tests.controller.fleets import GB, info, model, report

D = Digest("d")


def node(dram: float, ssd: float, **settings: Any) -> NodeRecord:
    rows = (Residency(D, 10 * GB, ssd_bytes=round(ssd * GB), dram_bytes=round(dram * GB)),)
    rates = tuple(TierBandwidth(t, r * GB) for t, r in ((Tier.REMOTE, 0.5), (Tier.SSD, 2.0), (Tier.DRAM, 20.0)))
    made = NodeRecord(report(residency=rows, bandwidths=rates, **settings))
    made.apply(made.report)
    return made


@pytest.mark.parametrize(
    ("dram", "ssd", "read_s", "tier"),
    [
        (10, 10, 0.5, Tier.DRAM),
        (0, 10, 5.0, Tier.SSD),
        (4, 10, 4 / 20 + 6 / 2, Tier.SSD),
        (0, 0, 20.0, Tier.REMOTE),
        (0, 6, 6 / 2 + 4 / 0.5, Tier.REMOTE),
        (2, 6, 2 / 20 + 4 / 2 + 4 / 0.5, Tier.REMOTE),
    ],
)
def test_reading_takes_bytes_over_bandwidth_for_each_tier(dram: float, ssd: float, read_s: float, tier: Tier) -> None:
    found = startup(node(dram, ssd), D, 10 * GB, 0.0)
    assert found.read_s == pytest.approx(read_s)
    assert found.tier is tier
    assert found.total_s == pytest.approx(read_s + 0.05)


def test_a_read_waits_for_the_storage_link_and_bytes_in_dram_do_not() -> None:
    for dram, expected in ((0, 3.0), (10, 0.0)):
        busy = node(dram, 10)
        busy.storage_free_at = 8.0
        assert startup(busy, D, 10 * GB, now=5.0).queue_s == expected


@pytest.mark.parametrize(
    ("what", "pool_gb", "free_gb", "others", "expected_s"),
    [
        ("room for everything there is", 64, 32, 1, 0.0),
        ("room, but full now: 10 GB are short of 6", 64, 4, 1, 3.0),
        ("room that stands free, and not for everything", 64, 32, 6, 5.0),
        ("it streams past a pool that is smaller", 8, 8, 6, 0.0),
    ],
)
def test_a_read_takes_room_from_others_unless_there_is_room_for_all(
    what: str, pool_gb: int, free_gb: int, others: int, expected_s: float
) -> None:
    made = node(0, 10, dram_pool_bytes=pool_gb * GB, dram_free_bytes=free_gb * GB)
    for n in range(others):
        made.residency[Digest(f"o{n}")] = Residency(Digest(f"o{n}"), 10 * GB, ssd_bytes=10 * GB, dram_bytes=0)
    assert taken_s(made, D, 10 * GB) == pytest.approx(expected_s)


def occupied(names: str, *, reported: str, num_slots: int, num_prewarmed: int) -> NodeRecord:
    """A node with these instances now, that told of processes when it ran `reported`."""
    statuses = tuple(
        InstanceStatus(InstanceId(name), model("a").model_id, Digest("e"), InstanceState.READY) for name in reported
    )
    settings = {"num_prewarmed": num_prewarmed, "process_s": 2.5, "instances": statuses}
    made = node(10, 10, num_slots=num_slots, **settings)
    for name in names:
        spec = InstanceSpec(InstanceId(name), model("a").model_id, Digest("e"))
        made.instances[spec.instance_id] = InstanceRecord(spec, made, ModelRecord(model("a")), 0.0)
    return made


@pytest.mark.parametrize(
    ("what", "names", "reported", "num_slots", "num_prewarmed", "expected_s"),
    [
        ("one is warm", "", "", 2, 1, 0.0),
        ("none is warm", "", "", 2, 0, 2.5),
        ("the one that is warm is spoken for", "a", "", 2, 1, 2.5),
        ("one has a process, none is spare", "a", "a", 2, 0, 2.5),
        ("one has a process, one is spare", "a", "a", 2, 1, 0.0),
        ("one stopped since and left its process", "b", "ab", 2, 0, 0.0),
        ("what it left is spoken for", "bc", "ab", 3, 0, 2.5),
        ("whose slot is taken leaves a process", "ab", "ab", 2, 0, 0.0),
        ("who took the slot and the process will leave them", "bc", "ab", 2, 0, 0.0),
    ],
)
def test_a_start_waits_for_a_process_only_where_none_is_warm_and_nobody_leaves_one(
    what: str, names: str, reported: str, num_slots: int, num_prewarmed: int, expected_s: float
) -> None:
    made = occupied(names, reported=reported, num_slots=num_slots, num_prewarmed=num_prewarmed)
    assert startup(made, D, 10 * GB, 0.0).process_s == expected_s


def test_an_unknown_checkpoint_is_all_remote() -> None:
    assert bytes_by_tier(node(0, 0), Digest("other"), 7) == (0, 0, 7)


@pytest.mark.parametrize(
    ("waiting", "places", "service_s", "expected"),
    [(0, 0, 1.0, 1.0), (10, 0, 2.0, 20.0), (40, 8, 2.0, 10.0), (10_000, 8, 2.0, 60.0), (3, 8, 0.1, 1.0)],
)
def test_retry_after_is_the_queue_over_its_pace(waiting: int, places: int, service_s: float, expected: float) -> None:
    made = ModelRecord(model("a"), service_s=service_s)
    for n in range(waiting):
        made.queue.push(RequestRecord(info(f"r{n}"), made.digest, n, 0.0, 0.0))
    if places:
        spec = InstanceSpec(InstanceId("i"), made.spec.model_id, made.digest)
        ready = InstanceRecord(spec, node(0, 0), made, 0.0, state=InstanceState.READY, max_running=places)
        made.instances[InstanceId("i")] = ready
    assert retry_after_s(made) == expected


def test_what_it_takes_to_compute_tokens_again_is_learned_as_a_line() -> None:
    stream, cost = Random(1), ResumeCost()
    assert not cost.is_known
    for _ in range(200):
        tokens = stream.randint(50, 1500)
        cost.note(tokens, 0.04 + 0.0002 * tokens + stream.gauss(0.0, 0.005))
    assert cost.is_known
    assert cost.seconds(1000) == pytest.approx(0.04 + 0.2, rel=0.05)
    assert cost.seconds(3000) == pytest.approx(0.04 + 0.6, rel=0.05)


@pytest.mark.parametrize(
    ("seen", "asked", "expected"),
    [
        ([(100, 0.5)] * 8, 4000, 0.5),
        ([(100, 0.5), (200, 0.1)] * 4, 300, 0.3),
        ([(900, 0.9), (1000, 1.2)] * 4, 400, 0.442),
    ],
    ids=["one length: its time", "longer ones took less: the mean", "no time left for none: through the origin"],
)
def test_a_line_is_believed_only_as_far_as_it_makes_sense(
    seen: list[tuple[int, float]], asked: int, expected: float
) -> None:
    cost = ResumeCost()
    for tokens, seconds in 4 * seen:
        cost.note(tokens, seconds)
    assert cost.seconds(asked) == pytest.approx(expected, rel=0.01)


def test_a_request_has_what_it_brought_and_what_it_had_time_for() -> None:
    request = RequestRecord(info("r", max_tokens=80), D, 1, 0.0, 0.0)
    request.num_kept, request.dispatched_at = 10.0, 100.0
    assert generated_tokens(request, 0.02, 101.0) == 10.0, "no token here yet"
    request.has_token = True
    assert generated_tokens(request, 0.02, 101.0) == 60.0
    assert generated_tokens(request, 0.02, 109.0) == 80.0, "no more than it may have"
    request.preempted_at = 100.5
    assert generated_tokens(request, 0.02, 109.0) == 35.0, "none since it gave way"

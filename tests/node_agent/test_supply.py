"""Processes started and ended for a device."""

from nearline.node_agent.supply import Demand, backoff_s, supply
from nearline.node_agent.types import CoreConfig, DeviceSlots
from nearline.protocol import DeviceInfo

INFO = DeviceInfo(0, "cpu", "Xeon", 1 << 34, num_slots=2)


def config(num_prewarmed: int) -> CoreConfig:
    return CoreConfig((INFO,), num_prewarmed, kv_bytes=1, max_running=1, num_cores=2)


def test_a_fresh_node_warms_its_spares() -> None:
    assert supply(Demand(0, 0, 0, 2), DeviceSlots(INFO), config(2), 0.0).num_starts == 2


def test_no_spare_is_warmed_while_a_start_is_under_way_or_just_over() -> None:
    quiet_later = DeviceSlots(INFO, quiet_at=10.0)
    assert supply(Demand(1, 0, 1, 1), DeviceSlots(INFO), config(2), 5.0).num_starts == 0
    waiting = supply(Demand(0, 0, 0, 1), quiet_later, config(2), 5.0)
    assert (waiting.num_starts, waiting.look_at) == (0, 10.0)
    assert supply(Demand(0, 0, 0, 1), quiet_later, config(2), 10.0).num_starts == 1


def test_an_instance_that_waits_for_a_process_gets_one_at_once() -> None:
    busy = DeviceSlots(INFO, quiet_at=10.0)
    assert supply(Demand(2, 1, 0, 0), busy, config(0), 5.0).num_starts == 1


def test_with_every_slot_taken_one_spare_stands_by() -> None:
    assert supply(Demand(0, 0, 0, 0), DeviceSlots(INFO), config(2), 0.0).num_starts == 1
    assert supply(Demand(0, 0, 0, 0), DeviceSlots(INFO), config(0), 0.0).num_starts == 0


def test_processes_beyond_the_wish_are_ended() -> None:
    assert supply(Demand(0, 0, 3, 2), DeviceSlots(INFO), config(2), 0.0).num_ends == 1
    assert supply(Demand(0, 0, 1, 2), DeviceSlots(INFO), config(0), 0.0).num_ends == 1
    assert supply(Demand(1, 0, 1, 1), DeviceSlots(INFO), config(0), 0.0).num_ends == 0


def test_the_process_an_instance_is_about_to_take_is_none_too_many() -> None:
    """When models take turns in a slot: one process was just let go of, a spare stands by, the next awaits frames."""
    assert supply(Demand(1, 0, 2, 0), DeviceSlots(INFO), config(1), 0.0).num_ends == 0
    assert supply(Demand(1, 0, 3, 0), DeviceSlots(INFO), config(1), 0.0).num_ends == 1


def test_a_process_too_many_is_kept_until_the_device_is_quiet() -> None:
    """What one model let go of, the next takes; only the wish for that may come a moment later."""
    just_let_go = DeviceSlots(INFO, quiet_at=10.0)
    kept = supply(Demand(0, 0, 2, 1), just_let_go, config(1), 8.0)
    assert (kept.num_ends, kept.look_at) == (0, 10.0)
    assert supply(Demand(0, 0, 2, 1), just_let_go, config(1), 10.0).num_ends == 1


def test_after_failures_one_process_at_a_time_is_tried_and_ever_later() -> None:
    unlucky = DeviceSlots(INFO, num_failures=2, retry_at=7.0)
    assert supply(Demand(2, 0, 0, 0), unlucky, config(2), 6.0).look_at == 7.0
    assert supply(Demand(2, 0, 0, 0), unlucky, config(2), 7.0).num_starts == 1
    assert supply(Demand(2, 1, 0, 0), unlucky, config(2), 7.0).num_starts == 0
    waits = [backoff_s(n, config(2)) for n in range(1, 12)]
    assert waits[:4] == [0.25, 0.5, 1.0, 2.0]
    assert waits[-1] == 30.0

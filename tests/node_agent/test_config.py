"""Sizes as people write them, and what follows from the machine."""

from pathlib import Path

import pytest

from nearline.node_agent.config import Device, Hardware, NodeConfig, check, parse_bytes, resolve
from nearline.protocol.errors import InvalidRequest

CPU = Hardware(2, 24 << 30, (Device("cpu", "Xeon", 24 << 30),))


def config(**fields: object) -> NodeConfig:
    return NodeConfig(controller_url="http://c", data_dir=Path("/d"), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1024", 1024), ("2GiB", 2 << 30), ("512m", 512 << 20), ("1.5 GB", 3 << 29), ("64MiB", 64 << 20), ("1k", 1024)],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1", "2XiB", "GiB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="2GiB"):
        parse_bytes(text)


def test_two_cores_give_two_slots_and_two_spares() -> None:
    resolved = resolve(config(), CPU)
    (device,) = resolved.devices
    assert (device.kind, device.num_slots, resolved.num_prewarmed) == ("cpu", 2, 2)
    assert resolved.kv_bytes == 3 << 30


def test_many_cores_do_not_mean_many_processes() -> None:
    resolved = resolve(config(), Hardware(64, 256 << 30, (Device("cpu", "Big", 256 << 30),)))
    assert (resolved.devices[0].num_slots, resolved.num_prewarmed) == (8, 2)


def test_each_gpu_is_one_slot_unless_told() -> None:
    gpus = Hardware(16, 128 << 30, (Device("cuda", "H200", 140 << 30, "0"), Device("cuda", "H200", 140 << 30, "1")))
    assert [d.num_slots for d in resolve(config(), gpus).devices] == [1, 1]
    assert [d.num_slots for d in resolve(config(num_slots=4), gpus).devices] == [4, 4]


def test_a_gpu_gives_weights_what_caches_and_contexts_leave() -> None:
    gpu = Hardware(16, 128 << 30, (Device("cuda", "H200", 140 << 30, "0"),))
    (device,) = resolve(config(num_slots=2, kv_bytes=40 << 30), gpu).devices
    assert 97 << 30 < device.weight_bytes < 100 << 30
    assert resolve(config(kv_bytes=200 << 30), gpu).devices[0].weight_bytes == 1
    assert resolve(config(), CPU).devices[0].weight_bytes == 0


def test_wishes_win_over_the_machine_and_nonsense_is_refused() -> None:
    resolved = resolve(config(num_slots=3, num_prewarmed=0, kv_bytes=1000, max_running=5), CPU)
    assert (resolved.devices[0].num_slots, resolved.num_prewarmed) == (3, 0)
    assert (resolved.kv_bytes, resolved.max_running) == (1000, 5)
    with pytest.raises(ValueError, match="num_slots is 0"):
        config(num_slots=0)


def test_more_memory_than_there_is_is_refused_with_both_numbers() -> None:
    check(config(pool_bytes=CPU.memory_bytes, kv_bytes=CPU.memory_bytes), CPU)
    with pytest.raises(InvalidRequest, match=r"--pool-bytes is 7,168\.0 GiB, and this machine has"):
        check(config(pool_bytes=7 << 40), CPU)
    with pytest.raises(InvalidRequest, match=r"--kv-bytes is 7,168\.0 GiB, and a device"):
        check(config(kv_bytes=7 << 40), CPU)

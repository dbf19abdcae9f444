"""What nvidia-smi lists, and the CPU stand-in."""

import psutil

from nearline.node_agent.devices import cuda_devices, probe_hardware

LISTING = "0, GPU-aaaa, NVIDIA H200, 143771\n1, GPU-bbbb, NVIDIA H200, 143771\n"


def test_rows_of_nvidia_smi_become_devices() -> None:
    devices = cuda_devices(LISTING, None)
    assert [(d.name, d.memory_bytes, d.visible_as) for d in devices] == [
        ("NVIDIA H200", 143771 * 1024**2, "0"),
        ("NVIDIA H200", 143771 * 1024**2, "1"),
    ]


def test_cuda_visible_devices_is_respected_by_index_and_by_uuid() -> None:
    assert [d.visible_as for d in cuda_devices(LISTING, "1")] == ["1"]
    assert [d.visible_as for d in cuda_devices(LISTING, "GPU-bbbb, 0")] == ["1", "0"]
    assert cuda_devices(LISTING, "7") == []


def test_a_machine_has_at_least_one_device_and_no_more_memory_than_it_has() -> None:
    hardware = probe_hardware()
    assert hardware.devices
    assert 1 <= hardware.num_cores <= (psutil.cpu_count() or 1)
    assert 0 < hardware.memory_bytes <= psutil.virtual_memory().total

"""Looks at the machine: cores, memory, GPUs. Never loads torch; a GPU is what `nvidia-smi` lists."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import psutil
import structlog

from nearline.node_agent.config import Device, Hardware

_CGROUP = Path("/sys/fs/cgroup")
_NVIDIA_SMI_TIMEOUT_S = 20.0
log = structlog.get_logger()


def probe_hardware() -> Hardware:
    """Describe the machine as this process may use it: GPUs if there are any, else the CPU stand-in."""
    memory_bytes = _memory_bytes()
    cpu = Device("cpu", _cpu_name(), memory_bytes)
    return Hardware(_num_cores(), memory_bytes, tuple(_cuda_devices()) or (cpu,))


def _num_cores() -> int:
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no container limit, or "max"
        return allowed


def _memory_bytes() -> int:
    total: int = psutil.virtual_memory().total
    try:
        return min(total, int((_CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):
        return total


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _cuda_devices() -> list[Device]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = shutil.which("nvidia-smi")
    if command is None or visible == "":
        return []
    query = [command, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("nvidia-smi does not answer; serving from the CPU", error=str(error))
        return []
    return cuda_devices(done.stdout, visible)


def cuda_devices(listing: str, visible: str | None) -> list[Device]:
    """Read nvidia-smi's rows (index, uuid, name, MiB); `visible` is CUDA_VISIBLE_DEVICES, None: all."""
    devices: dict[str, Device] = {}
    for row in listing.strip().splitlines():
        index, uuid, name, mebibytes = (cell.strip() for cell in row.split(","))
        device = Device("cuda", name, int(mebibytes) * 1024**2, index)
        devices[index] = devices[uuid] = device
    if visible is None:
        return list(dict.fromkeys(devices.values()))
    return [devices[name.strip()] for name in visible.split(",") if name.strip() in devices]

"""Settings of one node, and how their automatic values follow from the machine. Pure."""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from nearline.node_agent.types import CoreConfig
from nearline.protocol import Bytes, DeviceInfo
from nearline.protocol.errors import InvalidRequest

_MAX_AUTOMATIC_CPU_SLOTS = 8
_MAX_AUTOMATIC_PREWARMED = 2
_CPU_KV_SHARE = 0.125
_CUDA_KV_SHARE = 0.4
_CUDA_CONTEXT_BYTES = 768 * 1024**2
"""What a process takes of a GPU before any weights: context, code, workspaces of its libraries."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the machine. `visible_as` is what CUDA_VISIBLE_DEVICES calls it; empty for the CPU stand-in."""

    kind: str
    name: str
    memory_bytes: Bytes
    visible_as: str = ""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the machine offers to this process, limits of its container included."""

    num_cores: int
    memory_bytes: Bytes
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What a person may set. None: `resolve` (or, for the pool, the store) decides from the hardware."""

    controller_url: str
    data_dir: Path
    node_id: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    pool_bytes: Bytes | None = None
    ssd_bytes: Bytes | None = None
    num_slots: int | None = None
    num_prewarmed: int | None = None
    kv_bytes: Bytes | None = None
    max_running: int = 32
    hang_timeout_s: float = 30.0
    token: str | None = field(default=None, repr=False)
    engine_command: tuple[str, ...] = (sys.executable, "-m", "nearline.engine")
    engine_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (
            ("num_slots", 1),
            ("num_prewarmed", 0),
            ("kv_bytes", 1),
            ("max_running", 1),
            ("hang_timeout_s", 0.1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")


def check(config: NodeConfig, hardware: Hardware) -> None:
    """Raises InvalidRequest, with both numbers, for more memory than there is."""
    least = min(device.memory_bytes for device in hardware.devices)
    for option, wished, limit, where in (
        ("--pool-bytes", config.pool_bytes, hardware.memory_bytes, "this machine has"),
        ("--kv-bytes", config.kv_bytes, least, f"a device ({hardware.devices[0].name}) has"),
    ):
        if wished is not None and wished > limit:
            raise InvalidRequest(f"{option} is {_gib(wished)}, and {where} {_gib(limit)} of memory; ask for less")


def _gib(num_bytes: Bytes) -> str:
    return f"{num_bytes / 1024**3:,.1f} GiB"


def resolve(config: NodeConfig, hardware: Hardware) -> CoreConfig:
    """Size slots, spares and KV memory. On a CPU the slots share cores and memory; a GPU is one slot unless told."""
    is_cpu = hardware.devices[0].kind == "cpu"
    num_slots = config.num_slots or (min(hardware.num_cores, _MAX_AUTOMATIC_CPU_SLOTS) if is_cpu else 1)
    num_prewarmed = config.num_prewarmed
    if num_prewarmed is None:
        num_prewarmed = min(num_slots, _MAX_AUTOMATIC_PREWARMED)
    smallest = min(device.memory_bytes for device in hardware.devices)
    share = _CPU_KV_SHARE if is_cpu else _CUDA_KV_SHARE
    kv_bytes = config.kv_bytes or int(smallest * share)
    taken_bytes = kv_bytes + num_slots * _CUDA_CONTEXT_BYTES
    return CoreConfig(
        devices=tuple(
            DeviceInfo(
                index, d.kind, d.name, d.memory_bytes, num_slots, 0 if is_cpu else max(1, d.memory_bytes - taken_bytes)
            )
            for index, d in enumerate(hardware.devices)
        ),
        num_prewarmed=num_prewarmed,
        kv_bytes=kv_bytes,
        max_running=config.max_running,
        num_cores=hardware.num_cores,
    )


def parse_bytes(text: str) -> Bytes:
    """Read a size such as 2GiB, 512m or 1048576. Raises ValueError. Units: k, M, G and T are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it as 2GiB, 512MiB or a number of bytes")
    number, unit, _ = match.groups()
    return int(float(number) * 1024 ** _POWERS[unit.lower()])

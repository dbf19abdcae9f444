"""The processes and the memory of one machine: which instance runs in which engine process, over which bytes."""

from nearline.node_agent.config import Device, Hardware, NodeConfig, parse_bytes, resolve
from nearline.node_agent.core import NodeCore
from nearline.node_agent.lifecycle import TRANSITIONS, LifecycleEvent, next_state
from nearline.node_agent.types import CoreConfig

__all__ = [
    "TRANSITIONS",
    "CoreConfig",
    "Device",
    "Hardware",
    "LifecycleEvent",
    "NodeConfig",
    "NodeCore",
    "next_state",
    "parse_bytes",
    "resolve",
]

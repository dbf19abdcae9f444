"""Identifiers and units that every process uses. Ids are opaque strings; instants and durations are seconds."""

from typing import NewType

ModelId = NewType("ModelId", str)
"""A registered name; an adapter's name lives in the same namespace."""
NodeId = NewType("NodeId", str)
InstanceId = NewType("InstanceId", str)
RequestId = NewType("RequestId", str)
TenantId = NewType("TenantId", str)
JobId = NewType("JobId", str)
TaskId = NewType("TaskId", str)
"""One checkpoint import under way."""
Digest = NewType("Digest", str)
"""Content digest of a checkpoint: 32 hex digits of xxh3-128; also the name of its directory."""

Seconds = float
Bytes = int
BytesPerSecond = float

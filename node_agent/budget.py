"""How much of a device one instance gets: KV cache, sequences at once, threads. Pure."""

from dataclasses import dataclass

from nearline.protocol import Bytes, CheckpointInfo, DeviceInfo
from nearline.protocol.errors import OutOfMemory

MIN_CONTEXT_TOKENS = 256
"""A KV cache that cannot hold one sequence of this length (or of the model's context) is refused, not suffered."""


@dataclass(frozen=True, slots=True)
class Budget:
    """`kv_bytes` is at most what `max_running` sequences of full context can use."""

    kv_bytes: Bytes
    max_running: int


def instance_budget(checkpoint: CheckpointInfo, device: DeviceInfo, kv_bytes: Bytes, max_running: int) -> Budget:
    """Divide a device's KV memory by its slots and fit one checkpoint into a share.

    Raises OutOfMemory when a share cannot hold one useful sequence.
    """
    share = kv_bytes // device.num_slots
    per_token = checkpoint.kv_bytes_per_token
    if per_token <= 0:
        return Budget(share, max_running)
    shortest = min(MIN_CONTEXT_TOKENS, checkpoint.max_context_tokens or MIN_CONTEXT_TOKENS)
    num_sequences = share // (per_token * shortest)
    if num_sequences == 0:
        raise OutOfMemory(
            f"{checkpoint.source}: the KV of one sequence of {shortest} tokens takes {per_token * shortest} bytes, "
            f"but a slot of {device.name} has {share} ({kv_bytes} in {device.num_slots} slots); "
            "start the node with a larger --kv-bytes or fewer --slots"
        )
    running = min(max_running, num_sequences)
    longest = checkpoint.max_context_tokens * running * per_token
    return Budget(min(share, longest) if longest else share, running)


def instance_threads(num_cores: int, num_busy_slots: int) -> int:
    """Share the cores among the slots in use when an instance is bound; an instance keeps its share for its life."""
    return max(1, num_cores // max(1, num_busy_slots))

"""Shares of a device: worked by hand."""

import pytest

from nearline.node_agent.budget import instance_budget, instance_threads
from nearline.protocol import CheckpointInfo, CheckpointKind, DeviceInfo, Digest
from nearline.protocol.errors import OutOfMemory

DEVICE = DeviceInfo(0, "cpu", "Xeon", 1 << 34, num_slots=2)


def checkpoint(context: int, per_token: int) -> CheckpointInfo:
    return CheckpointInfo(
        Digest("d"), CheckpointKind.MODEL, 1, "llama", "LlamaForCausalLM", "/models/x", "bfloat16", (),
        max_context_tokens=context, kv_bytes_per_token=per_token,
    )  # fmt: skip


def test_a_slot_gets_its_share_of_the_kv_memory() -> None:
    budget = instance_budget(checkpoint(100_000, 1000), DEVICE, kv_bytes=2_000_000_000, max_running=32)
    assert (budget.kv_bytes, budget.max_running) == (1_000_000_000, 32)


def test_no_more_is_taken_than_full_contexts_need() -> None:
    budget = instance_budget(checkpoint(512, 1000), DEVICE, kv_bytes=2_000_000_000, max_running=4)
    assert budget.kv_bytes == 512 * 1000 * 4


def test_fewer_sequences_run_when_memory_is_short() -> None:
    budget = instance_budget(checkpoint(4096, 1000), DEVICE, kv_bytes=2 * 256 * 1000 * 3, max_running=32)
    assert budget.max_running == 3


def test_a_share_that_holds_no_sequence_is_refused_with_the_numbers_and_the_cure() -> None:
    with pytest.raises(OutOfMemory, match=r"256000 bytes.*127999.*--kv-bytes"):
        instance_budget(checkpoint(4096, 1000), DEVICE, kv_bytes=255_999, max_running=32)


@pytest.mark.parametrize(("cores", "busy", "threads"), [(2, 1, 2), (2, 2, 1), (2, 3, 1), (16, 3, 5), (1, 0, 1)])
def test_cores_are_shared_by_the_slots_in_use(cores: int, busy: int, threads: int) -> None:
    assert instance_threads(cores, busy) == threads

"""The agent with the engine it ships with, on a tiny random model."""

import signal
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM

from nearline.protocol import CheckpointInfo
from tests.node_agent.conftest import FakeController, running_agent


def greedy(source: str, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers generates."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


async def test_real_tokens_flow_survive_a_crash_and_leave_nothing_behind(
    controller: FakeController, data_dir: Path, stored_checkpoint: tuple[CheckpointInfo, Path]
) -> None:
    info = stored_checkpoint[0]
    expected = greedy(info.source, [1, 2, 3], 12)
    async with running_agent(controller, data_dir, "--slots", "1", "--prewarm", "1", engine=None) as agent:
        await controller.report(lambda r: r.num_prewarmed == 1)
        for number in range(3):
            instance_id = f"i{number}"
            await controller.ensure(instance_id, info.digest)
            status = await controller.state(instance_id, "ready")  # a killed engine's heir imports torch
            assert status.kv_tokens_total > 0
            await controller.submit(instance_id, f"r{number}", max_tokens=12)
            updates = await controller.finished(f"r{number}")
            assert [t for u in updates for t in u.token_ids] == expected
            if number == 0:  # unbound and bound again
                await controller.stop_instance(instance_id)
                await controller.state(instance_id, "stopped")
            if number == 1:  # killed, and started anew
                agent.engines()[0].send_signal(signal.SIGKILL)
                assert "signal 9" in (await controller.state(instance_id, "failed")).error.message
        children = psutil.Process(agent.process.pid).children(recursive=True)
        assert children
        assert await agent.terminate() == 0
        assert not [child for child in children if child.is_running()]

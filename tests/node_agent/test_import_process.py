"""One process imports adapter after adapter; one that fails does not end it, and nobody shares its end."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nearline.checkpoint_store.convert import import_checkpoint
from nearline.node_agent.import_process import ImportProcess
from nearline.protocol import CheckpointKind, Digest, TaskId
from nearline.protocol.frames import ImportCheckpoint


def make_adapters(base_dir: Path, directory: Path, count: int) -> list[Path]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        peft: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base_dir), config)
        made.append(directory / f"adapter-{seed}")
        peft.save_pretrained(str(made[-1]))
    return made


async def outcome(process: ImportProcess, source: Path, base: Digest) -> dict[str, Any]:
    said: dict[str, Any] = {}
    async for said in process.ask(ImportCheckpoint(TaskId("t"), CheckpointKind.ADAPTER, str(source), base)):
        if "needs_bytes" in said:
            await process.answer({})
    return said


async def test_adapters_follow_each_other_in_one_process(tiny_llama_dir: Callable[..., Path], tmp_path: Path) -> None:
    base_dir = tiny_llama_dir()
    base = import_checkpoint(tmp_path / "root", CheckpointKind.MODEL, str(base_dir)).digest
    one, other = make_adapters(base_dir, tmp_path, 2)
    process = await ImportProcess.start(tmp_path / "root", os.environ)
    try:
        first = await outcome(process, one, base)
        failed = await outcome(process, tmp_path / "nowhere", base)
        second = await outcome(process, other, base)
    finally:
        is_alive = process.is_alive
        await process.end()
    assert is_alive
    assert not process.is_alive
    assert "nowhere" in failed["error"]["message"]
    digests = {said["checkpoint"]["digest"] for said in (first, second)}
    assert len(digests) == 2
    assert all((tmp_path / "root" / "checkpoints" / digest / "manifest.json").is_file() for digest in digests)


async def test_an_idle_process_ends_at_once_when_told_to(tmp_path: Path) -> None:
    process = await ImportProcess.start(tmp_path, os.environ)
    await asyncio.wait_for(process.end(), timeout=60)
    assert not process.is_alive

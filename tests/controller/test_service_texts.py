"""The service's care for tokenizers: it outlives torn files, and keeps what is needed now."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nearline.controller import service
from nearline.controller.text.models import TextModels
from nearline.protocol import CheckpointInfo, CheckpointKind, Digest, ModelId, ModelSpec


async def test_a_torn_tokenizer_stops_no_controller_and_unneeded_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(digest: Digest, name: str) -> bytes:
        raise AssertionError("it is here")

    monkeypatch.setattr(service, "TEXT_SWEEP_S", 0.01)
    for name in ("torn", "removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_bytes(b"")
    info = CheckpointInfo(Digest("torn"), CheckpointKind.MODEL, 1, "f", "a", "/m", "float32", ("tokenizer.json",))
    models = {"m": ModelSpec(ModelId("m"), info, 1.0)}
    door: Any = SimpleNamespace(texts=TextModels(tmp_path, fetch), registry=SimpleNamespace(models=models))
    tending = asyncio.create_task(service._tend_texts(door, {Digest("torn"): 1}))
    async with asyncio.timeout(60):
        while (tmp_path / "removed").exists():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
    assert not tending.done()
    tending.cancel()

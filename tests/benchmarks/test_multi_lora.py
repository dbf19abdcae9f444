"""The multi-LoRA measurement runs as a whole on a tiny model, and says of every aim whether it is met."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import multi_lora
from benchmarks.multi_lora_report import write


def test_every_aim_gets_a_number_and_a_verdict(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["multi_lora.py", "--quick"])
    found = multi_lora.measure(str(tiny_llama_dir()), tmp_path, multi_lora.QUICK)
    text = write(found, tmp_path).read_text()
    rows = [line for line in text.splitlines() if line.startswith(("| batch 32,", "| first use from", "| dynamic"))]
    assert len(rows) == 7
    assert all(row.endswith(("| yes |",)) or "| no, by " in row for row in rows)
    assert (tmp_path / "multi_lora.svg").stat().st_size > 1000
    assert {place: len(seconds) for place, seconds in found.first_use_s.items()} == {
        "DRAM": 2,
        "SSD": 2,
        "SSD, read ahead": 2,
    }
    assert found.popularity["zipf", 8].num_tokens > 0

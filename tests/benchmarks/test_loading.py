"""The loading benchmark: its verdicts on made-up numbers, and one small run of all of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.loading_report import Found, aims, body

GB = 10**9
ROUND = {
    "fio a": 1.0 * GB, "fio b": 2.0 * GB, "nearline cold": 1.5, "nearline filled": 1.4, "nearline cold cpu": 0.1,
    "nearline verified cold": 1.8, "nearline verified cold cpu": 0.2, "nearline warm": 0.1, "nearline warm cpu": 0.1,
    "safetensors cold": 3.0, "safetensors cold cpu": 1.0, "torch.load cold": 6.0, "torch.load cold cpu": 0.4,
}  # fmt: skip


def found(**rounds: list[dict[str, float]]) -> Found:
    return Found(3 * GB, 1, {"readers": [ROUND], **rounds}, ["nothing is left out"], 64)


def test_every_aim_is_held_against_the_better_limit_and_the_right_rival() -> None:
    measured = {aim.what: aim.values for aim in aims(found())}
    assert measured["cold, SSD → usable tensors, of fio b"] == [1.0]
    assert measured["cold, times the fastest rival's rate"] == [2.0]
    assert measured["cold, times the rivals' median rate"] == [3.0]
    assert measured["cold, CPU seconds, of the cheapest rival's"] == [pytest.approx(0.25)]
    assert measured["verification, of a cold load"] == [pytest.approx(0.2)]


def test_an_aim_that_is_missed_says_by_how_much_and_what_was_not_measured_is_not_judged() -> None:
    rows = {aim.what: aim.row() for aim in aims(found(swap=[{"swap": 0.25, "forward": 0.2}]))}
    assert rows["verification, of a cold load"][3] == "no, by 0.1"
    assert rows["swap in DRAM to the first token of one token"][2:] == ["250 ms (250–250)", "no, by 150 ms"]
    assert rows["the same without that token's own forward pass"][3] == "yes"
    assert not any("tmpfs" in what for what in rows)
    text = body(found())
    assert "- nothing is left out" in text
    assert "| safetensors" in text
    assert "| tensorizer" not in text


def test_swaps_and_imports_are_told_beside_what_the_machine_alone_would_take() -> None:
    swap = {"swap": 0.15, "forward": 0.12, "unbind": 0.004, "unbind and bind": 0.01, "weights once through memory": 0.1}
    imported = {"write": 2.0 * GB, "from memory": 1.0 * GB, "from memory s": 3.0, "from memory floor s": 1.5}
    text = body(found(swap=[swap], **{"import": [imported]}))
    assert "the floor of the first token is 100 ms, every weight read once at the 30 GB/s" in text
    assert "unbinding 4.0 ms, then binding until 10.0 ms, then 140.0 ms for the first token" in text
    assert "from memory, every byte is written once: 3.0 s, the disk alone 1.5 s (" in text
    assert "from disk" not in text


def test_a_miss_is_out_of_reach_only_where_the_device_alone_would_miss_too() -> None:
    disk = {"write": 2.0 * GB, "from disk": 0.7 * GB, "from disk s": 4.3, "from disk floor s": 3.75}
    memory = {"write": 2.0 * GB, "from memory": 0.9 * GB, "from memory s": 3.3, "from memory floor s": 1.5}
    swap = {"swap": 0.15, "forward": 0.12, "weights once through memory": 0.06}
    rows = {aim.what: aim.row()[3] for aim in aims(found(swap=[swap], **{"import": [disk, memory]}))}
    # Of 2 GB/s written, 3 GB in 3.75 s are 0.4; in 1.5 s they are all of it.
    assert rows["import from disk, of the disk's write bandwidth"] == (
        "no, by 0.15; out of reach: the device alone gives 0.4"
    )
    assert rows["import from memory, of the disk's write bandwidth"] == "no, by 0.05"
    assert rows["swap in DRAM to the first token of one token"] == "no, by 50 ms"


@pytest.mark.slow
def test_a_small_run_measures_everything_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-m", "benchmarks.loading", "--quick", "--rivals", "safetensors", "torch.load mmap"]
    command += ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=110)
    text = (tmp_path / "results" / "loading.md").read_text()
    for section in ("cold, SSD → usable tensors", "DRAM → tensors", "import from memory", "swap in DRAM", "tmpfs"):
        assert section in text
    assert (tmp_path / "results" / "loading.svg").read_text().startswith("<?xml")
    assert list((tmp_path / "work").iterdir()) == []

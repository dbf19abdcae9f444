"""A fleet file says what machines and models there are; what it does not say has a default, what it misspells fails."""

import json
from pathlib import Path

import pytest

from nearline.protocol import Digest, NodeId, StepProfile, StepTimeModel, to_plain
from nearline.simulator import read_fleet

FLEET = """
[[nodes]]
count = 2
name = "big"
slots = 4
dram_gb = 100.0
ssd_gb_per_s = 3.5
max_running = 8

[[nodes]]
devices = 2
weight_gb = 40.0
slowdown_beside = 0.4

[[models]]
count = 2
name = "chat-"
gb = 7.0
keep_alive_s = 30.0
max_replicas = 3

[[models]]
name = "tiny"
gb = 0.3
bind_s = 0.02
step_profile = "tiny.json"
"""


def write(folder: Path, text: str = FLEET) -> Path:
    steps = StepTimeModel(
        prefill_base_s=0.01,
        prefill_per_token_s=1e-4,
        prefill_per_square_s=0.0,
        decode_base_s=0.01,
        decode_per_context_s=0.0,
        decode_per_sequence_s=1e-3,
    )
    profile = StepProfile(Digest("d"), "cpu", 2, steps, 0.05, 0.04, 100, 4e9, 1.0)
    # As `nearline profile tiny --json` prints it: with whose it is and where it was measured.
    (folder / "tiny.json").write_text(json.dumps({"id": "tiny", "node": "n-1", **to_plain(profile)}) + "\n")
    path = folder / "fleet.toml"
    path.write_text(text)
    return path


def test_a_fleet_file_names_counts_and_measures(tmp_path: Path) -> None:
    fleet = read_fleet(write(tmp_path))
    assert list(fleet.machines) == ["big1", "big2", "n2-"]
    big, other = fleet.machines[NodeId("big1")], fleet.machines[NodeId("n2-")]
    assert (big.num_slots, big.dram_bytes, big.cost.ssd_bytes_per_s, big.cost.max_running) == (4, 100e9, 3.5e9, 8)
    assert (other.num_devices, other.weight_bytes, other.num_slots) == (2, 40e9, 1)
    assert (big.slowdown_beside, other.slowdown_beside) == (0.0, 0.4)
    assert fleet.names == ("chat-1", "chat-2", "tiny")
    assert [spec.max_replicas for spec in fleet.specs] == [3, 3, 1]
    tiny = fleet.models[fleet.specs[2].checkpoint.digest]
    assert tiny.steps is not None
    assert (tiny.num_bytes, tiny.binds_s, tiny.steps.decode_per_sequence_s) == (300_000_000, (0.02,), 1e-3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (FLEET.replace("slots = 4", "slot = 4"), r"unknown keys of a node: \['slot'\]"),
        (FLEET.replace("gb = 7.0", "gib = 7.0"), r"unknown keys of a model: \['gib'\]"),
        ("[[nodes]]\nslots = 1\n", "a fleet has"),
        ("nodes = [", "fleet.toml"),
    ],
)
def test_a_mistake_is_named_with_the_file(tmp_path: Path, wrong: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_fleet(write(tmp_path, wrong))


def test_a_step_profile_that_is_none_or_absent_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "tiny.json").write_text('{"id": "tiny", "node": "n-1"}')
    with pytest.raises(ValueError, match=r"tiny\.json is not what `nearline profile NAME --json` prints"):
        read_fleet(path)
    (tmp_path / "tiny.json").unlink()
    with pytest.raises(ValueError, match=r"tiny\.json: No such file"):
        read_fleet(path)

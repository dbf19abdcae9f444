"""What a run starts with: machines and models, from options or from a TOML file.

    [[nodes]]                        [[models]]
    count = 4                        count = 20                  # m01 … m20
    profile = "a10g-7b"              name = "m"
    slots = 2                        gb = 14.0
    dram_gb = 64.0                   keep_alive_s = 300.0
    ssd_gb_per_s = 2.0               step_profile = "m.json"     # `nearline profile m --json > m.json`
    slowdown_beside = 0.0            # 1.0: slots that share all cores (`--detail engine`)

Every key has a default; relative paths start at the file; an unknown key is an error.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nearline.protocol import (
    CheckpointInfo,
    CheckpointKind,
    Digest,
    ModelId,
    ModelSpec,
    NodeId,
    StepProfile,
    from_plain,
)
from nearline.simulator.cost_model import CostModel, Machine, SimulatedModel
from nearline.simulator.node import MakeEngine, SimulatedNode, paced
from nearline.simulator.profiles import PROFILES

GB = 10**9
_PROFILE_OF = ("id", "node")
_SPEC = ("keep_alive_s", "keep_alive_min_s", "min_replicas", "max_replicas")
_COST = {"ssd_gb_per_s": "ssd_bytes_per_s", "dram_gb_per_s": "dram_bytes_per_s"}
_COST_PLAIN = (
    "bind_s",
    "process_s",
    "stop_s",
    "max_running",
    "kv_tokens",
    "max_step_tokens",
    "step_overhead_s",
    "hop_s",
)
_MACHINE = {"slots": "num_slots", "devices": "num_devices", "prewarmed": "num_prewarmed"}
_MACHINE_PLAIN = ("slowdown_beside",)
_MACHINE_GB = {"dram_gb": "dram_bytes", "weight_gb": "weight_bytes", "frame_gb": "frame_bytes"}


@dataclass(frozen=True, slots=True)
class Fleet:
    """Machines by name, and models with what they cost. `nodes` are made new for every run."""

    machines: Mapping[NodeId, Machine]
    specs: tuple[ModelSpec, ...]
    models: Mapping[Digest, SimulatedModel]

    @property
    def names(self) -> tuple[ModelId, ...]:
        return tuple(spec.model_id for spec in self.specs)

    def nodes(self, make_engine: MakeEngine = paced) -> list[SimulatedNode]:
        return [SimulatedNode(node_id, machine, self.models, make_engine) for node_id, machine in self.machines.items()]


def numbered(name: str, count: int) -> list[str]:
    """Names of `count` things: as they are for one, with numbers of equal width for more."""
    width = len(str(count))
    return [name] if count == 1 else [f"{name}{index:0{width}d}" for index in range(1, count + 1)]


def add_models(name: str, count: int, model: SimulatedModel, **spec: Any) -> list[tuple[ModelSpec, SimulatedModel]]:
    """Make `count` equal models; `spec` are fields of ModelSpec."""
    made = []
    for each in numbered(name, count):
        digest = Digest(f"digest-{each}")
        kind = (CheckpointKind.MODEL, model.num_bytes, "llama", "LlamaForCausalLM", "", "bfloat16", ())
        made.append((ModelSpec(ModelId(each), CheckpointInfo(digest, *kind), created_at=0.0, **spec), model))
    return made


def make_fleet(machines: Mapping[str, Machine], models: list[tuple[ModelSpec, SimulatedModel]]) -> Fleet:
    named = {NodeId(name): machine for name, machine in machines.items()}
    costs = {spec.checkpoint.digest: model for spec, model in models}
    return Fleet(named, tuple(spec for spec, _ in models), costs)


def read_fleet(path: Path) -> Fleet:
    """Read a fleet file. Raises ValueError naming the file and what is wrong in it."""
    try:
        whole = tomllib.loads(path.read_text())
        unknown = sorted(set(whole) - {"nodes", "models"})
        if unknown or not whole.get("nodes") or not whole.get("models"):
            raise ValueError(f"it has {unknown or sorted(whole)}; a fleet has [[nodes]] and [[models]]")
        machines: dict[str, Machine] = {}
        for index, row in enumerate(whole["nodes"]):
            default = "n" if len(whole["nodes"]) == 1 else f"n{index + 1}-"
            machines |= dict.fromkeys(numbered(row.pop("name", default), row.pop("count", 1)), _machine(row))
        models = [pair for row in whole["models"] for pair in _models(row, path.parent)]
        return make_fleet(machines, models)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_profile(path: Path) -> StepProfile:
    """Read what `nearline profile --json` printed: a profile, whose it is and where it was measured."""
    try:
        plain = json.loads(path.read_text())
        if isinstance(plain, dict):
            plain = {key: value for key, value in plain.items() if key not in _PROFILE_OF}
        return from_plain(StepProfile, plain)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not what `nearline profile NAME --json` prints: {error}") from None


def _machine(row: dict[str, Any]) -> Machine:
    cost = PROFILES[row.pop("profile", "a10g-7b")]
    rates = {field: row.pop(key) * GB for key, field in _COST.items() if key in row}
    plain = {key: row.pop(key) for key in _COST_PLAIN if key in row}
    counts = {field: row.pop(key) for key, field in _MACHINE.items() if key in row}
    sizes = {field: round(row.pop(key) * GB) for key, field in _MACHINE_GB.items() if key in row}
    own = {key: row.pop(key) for key in _MACHINE_PLAIN if key in row}
    if row:
        raise ValueError(f"unknown keys of a node: {sorted(row)}")
    return Machine(cost=replace(cost, **rates, **plain), **{**{"num_prewarmed": 1}, **counts}, **sizes, **own)


def _models(row: dict[str, Any], folder: Path) -> list[tuple[ModelSpec, SimulatedModel]]:
    name, count, num_bytes = row.pop("name", "m"), row.pop("count", 1), round(row.pop("gb", 14.0) * GB)
    spec = {key: row.pop(key) for key in _SPEC if key in row}
    file = row.pop("step_profile", None)
    binds_s = (row.pop("bind_s"),) if "bind_s" in row else ()
    if row:
        raise ValueError(f"unknown keys of a model: {sorted(row)}")
    steps = None if file is None else read_profile(folder / file).model
    return add_models(name, count, SimulatedModel(num_bytes=num_bytes, steps=steps, binds_s=binds_s), **spec)


def equal_machine(profile: str, slots: int, dram_gb: float) -> Machine:
    """A machine of a known profile whose spare processes never run out."""
    cost: CostModel = PROFILES[profile]
    return Machine(cost=cost, num_slots=slots, num_prewarmed=slots, dram_bytes=round(dram_gb * GB))

"""Many adapters on one base: decode speed, first use, thousands registered, dynamic merging, and peft beside it.

Usage: python -m benchmarks.multi_lora MODEL.gguf [--quick]     Writes benchmarks/results/multi_lora.md and .svg.
Random adapters of rank 16 on all seven projections; the engine's own mind and runner, without sockets. Speeds are
measured in interleaved rounds: every ratio is of one round, and medians of ratios are reported. About 10 minutes.
"""

import argparse
import json
import logging
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from benchmarks.multi_lora_adapters import make_adapter
from benchmarks.multi_lora_engine import MiniEngine, Outcome
from benchmarks.multi_lora_first_use import NUM_ADAPTERS, NUM_USES, first_uses_s
from benchmarks.multi_lora_parts import batch_tokens_per_s, peft_tokens_per_s, popularity_tokens_per_s
from benchmarks.multi_lora_report import write
from benchmarks.multi_lora_switching import Switching
from benchmarks.multi_lora_switching import measure as measure_switching
from nearline import kernels
from nearline.checkpoint_store.convert import import_checkpoint
from nearline.engine.config import MergeMode
from nearline.protocol import CheckpointKind, DecoderSpec, Digest, Seconds, decoder_spec

STRIDES = (4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    num_rounds: int = 3
    num_steps: int = 16
    num_registered: tuple[int, ...] = (10, 50, 200, 1000, 2000)
    popularity_s: Seconds = 7.0
    num_switching: int = 40
    num_switching_rounds: int = 7
    num_first_uses: int = NUM_USES
    strides: tuple[int, ...] = STRIDES
    peft_steps: int = 12


QUICK = Size(1, 2, (4, 8), 0.5, 8, 2, 2, (4,), 0)


@dataclass(slots=True)
class Found:
    """Everything measured. `speeds`: tokens/s per round by (batch, distinct adapters); -1 distinct: merged."""

    size: Size
    speeds: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    first_use_s: dict[str, list[Seconds]] = field(default_factory=dict)
    popularity: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    switching: Switching = field(default_factory=Switching)
    peft: dict[int, float] = field(default_factory=dict)
    registering_s: Seconds = 0.0
    num_resident: int = 0


def measure(model: str, root: Path, size: Size) -> Found:
    """Run all parts in a scratch directory."""
    found = Found(size)
    base = import_checkpoint(root, CheckpointKind.MODEL, model).digest
    directory = root / "checkpoints" / base
    spec = decoder_spec(json.loads((directory / "config.json").read_text()))
    digests = [make_adapter(root, base, spec, seed) for seed in range(32)]
    _batches(found, directory, digests)
    found.first_use_s = first_uses_s(root, base, digests[:NUM_ADAPTERS], size.num_first_uses)
    rounds = (size.num_switching, size.num_switching_rounds)
    found.switching = measure_switching(directory, digests[:8], size.strides, rounds)
    _popularity(found, root, (base, directory), spec)
    if size.peft_steps:
        for batch in (8, 32):
            found.peft[batch] = peft_tokens_per_s(directory, batch, 8, size.peft_steps)
    return found


def _batches(found: Found, directory: Path, digests: list[Digest]) -> None:
    engine = MiniEngine(directory, 1 << 30, MergeMode.ALWAYS)
    engine.load(digests)
    runner = engine.runner
    while not runner.merge(digests[0], lambda: True):
        pass
    for _ in range(found.size.num_rounds):
        for batch in (8, 32):
            for distinct in (0, 1, 8, 32, -1):
                if distinct > batch:
                    continue
                used = [digests[i % distinct] if distinct > 0 else None for i in range(batch)]
                merged = digests[0] if distinct < 0 else None
                rows = [digests[0]] * batch if distinct < 0 else used
                speed = batch_tokens_per_s(runner, rows, found.size.num_steps, merged)
                found.speeds.setdefault((batch, distinct), []).append(speed)


def _popularity(found: Found, root: Path, base: tuple[Digest, Path], spec: DecoderSpec) -> None:
    started = time.perf_counter()
    most = max(found.size.num_registered)
    many = [make_adapter(root, base[0], spec, 10_000 + i, 8, ("q_proj", "v_proj")) for i in range(most)]
    found.registering_s = time.perf_counter() - started
    for kind in ("zipf", "uniform"):
        for count in found.size.num_registered:
            engine = MiniEngine(base[1], 256 << 20)
            found.num_resident = engine.config.max_adapters
            is_zipf, seconds = kind == "zipf", found.size.popularity_s
            found.popularity[kind, count] = popularity_tokens_per_s(engine, many[:count], is_zipf, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    parser.add_argument("--out", type=Path, help="write the results here instead")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    kernels.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(arguments.model, Path(scratch), QUICK if arguments.quick else Size())
    print(write(found, arguments.out))


if __name__ == "__main__":
    main()

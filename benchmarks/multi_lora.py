"""Decoding with many adapters in one batch: against the base alone, merged weights, and peft's mixed batches.

Usage: python -m benchmarks.multi_lora MODEL.gguf [--rounds 5] [--steps 24]     Writes benchmarks/results/multi_lora.md.
Random adapters of rank 16 on all seven projections; the runner steps sequences as the engine does, without sockets.
Rounds are interleaved: every ratio is of one round, and medians of ratios are reported.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from nearline import kernels
from nearline.checkpoint_store.convert import import_checkpoint
from nearline.engine.models.lora import Adapter, LoraWeights
from nearline.engine.runner import Runner, RunnerConfig
from nearline.engine.sequence import Sequence
from nearline.engine.types import Batch, BatchItem
from nearline.loader import load_directory
from nearline.protocol import (
    CheckpointKind,
    DecoderSpec,
    Digest,
    ModelId,
    Request,
    RequestId,
    SamplingParams,
    decoder_spec,
)

RANK, NUM_ADAPTERS, PROMPT_TOKENS = 16, 32, 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
PEFT_BATCH, PEFT_ADAPTERS = 8, 8


def random_adapter(spec: DecoderSpec, dtype: torch.dtype, index: int) -> Adapter:
    """An adapter of RANK on every projection of every layer."""
    draw = torch.Generator().manual_seed(index)
    q, kv, M, F = spec.query_dim, spec.kv_dim, spec.model_dim, spec.ffn_dim
    sizes = {
        "q_proj": (q, M), "k_proj": (kv, M), "v_proj": (kv, M), "o_proj": (M, q),
        "gate_proj": (F, M), "up_proj": (F, M), "down_proj": (M, F),
    }  # fmt: skip

    def pair(rows: int, columns: int) -> LoraWeights:
        a_RM = (torch.randn(RANK, columns, generator=draw) * 0.01).to(dtype)
        b_RN = (torch.randn(RANK, rows, generator=draw) * 0.01).to(dtype)
        return LoraWeights(a_RM, b_RN.T)

    layers = [{name: pair(*size) for name, size in sizes.items()} for _ in range(spec.num_layers)]
    return Adapter.of(Digest(f"{index:032x}"), layers)


class Bench:
    """A bound runner and batches of sequences that decode for ever."""

    def __init__(self, directory: Path, spec: DecoderSpec, kv_bytes: int) -> None:
        self.runner = Runner(load_directory(directory, "cpu"), spec, RunnerConfig(kv_bytes=kv_bytes))
        for index in range(NUM_ADAPTERS):
            self.runner.adapters.add(random_adapter(spec, self.runner.dtype, index))

    def tokens_per_s(self, batch: int, num_adapters: int, num_steps: int) -> float:
        """Prefill `batch` sequences, the i-th on adapter i mod `num_adapters` (0: the base), then time decode steps."""
        draw, blocks = random.Random(0), iter(range(self.runner.num_blocks))
        sequences = []
        for index in range(batch):
            prompt = tuple(draw.randrange(1000) for _ in range(PROMPT_TOKENS))
            digest = Digest(f"{index % num_adapters:032x}") if num_adapters else None
            request = Request(RequestId(f"r{index}"), ModelId("m"), prompt, GREEDY, adapter_digest=digest)
            sequences.append(Sequence(request, 1, list(prompt), arrived_at=0.0))
        self._step(sequences, blocks)
        self._step(sequences, blocks)
        started = time.perf_counter()
        for _ in range(num_steps):
            self._step(sequences, blocks)
        return batch * num_steps / (time.perf_counter() - started)

    def _step(self, sequences: list[Sequence], blocks: Iterator[int]) -> None:
        items = []
        for sequence in sequences:
            start, num_tokens = sequence.num_computed, sequence.num_uncomputed
            while len(sequence.block_table) * self.runner.kv.block_size < start + num_tokens:
                sequence.block_table.append(next(blocks))
            sequence.num_computed += num_tokens
            items.append(BatchItem(sequence, start, num_tokens, True))
        for sequence, sampled in zip(sequences, self.runner.run(Batch(items)), strict=True):
            sequence.token_ids.append(sampled.token_id)


def peft_tokens_per_s(directory: Path, num_steps: int) -> float:
    """A mixed batch of PEFT_BATCH rows over PEFT_ADAPTERS adapters by peft's `adapter_names=`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", init_lora_weights=False)
    adapted: Any = get_peft_model(model, config, adapter_name="0")
    for index in range(1, PEFT_ADAPTERS):
        adapted.add_adapter(str(index), config)
    adapted = adapted.to(torch.bfloat16).eval()
    names = [str(index % PEFT_ADAPTERS) for index in range(PEFT_BATCH)]
    ids = torch.randint(1, 1000, (PEFT_BATCH, PROMPT_TOKENS))
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "adapter_names": names}
    with torch.inference_mode():
        adapted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, **settings)
        started = time.perf_counter()
        adapted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_steps, **settings)
    return PEFT_BATCH * num_steps / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-peft", action="store_true")
    arguments = parser.parse_args()
    kernels.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        digest = import_checkpoint(root, CheckpointKind.MODEL, str(arguments.model)).digest
        directory = root / "checkpoints" / digest
        bench = Bench(directory, _spec(directory), kv_bytes=256 << 20)
        speeds = _measure(bench, arguments.rounds, arguments.steps)
        peft = None if arguments.no_peft else peft_tokens_per_s(directory, arguments.steps)
    print(record.write("multi_lora", "Many adapters in one batch", _report(speeds, peft)))


def _spec(directory: Path) -> DecoderSpec:
    return decoder_spec(json.loads((directory / "config.json").read_text()))


def _measure(bench: Bench, num_rounds: int, num_steps: int) -> dict[tuple[int, int], list[float]]:
    speeds: dict[tuple[int, int], list[float]] = {}
    for _ in range(num_rounds):
        for batch in (8, 32):
            for num_adapters in (0, 1, 8, 32):
                if num_adapters <= batch:
                    speed = bench.tokens_per_s(batch, num_adapters, num_steps)
                    speeds.setdefault((batch, num_adapters), []).append(speed)
    return speeds


def _report(speeds: dict[tuple[int, int], list[float]], peft: float | None) -> str:
    rows = []
    for (batch, num_adapters), values in speeds.items():
        ratios = [value / base for value, base in zip(values, speeds[batch, 0], strict=True)]
        cells = [str(batch), str(num_adapters or "base"), f"{statistics.median(values):.0f}"]
        rows.append([*cells, f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"])
    body = record.table(("batch", "distinct adapters", "tokens/s, median", "of base: median (range)"), rows)
    body += "\n\nMerged weights have the base's shapes, hence the base's speed: 1.00 of it, paid with a private copy.\n"
    if peft is not None:
        ours = statistics.median(speeds[PEFT_BATCH, PEFT_ADAPTERS])
        body += (
            f"\npeft, `adapter_names=`, batch {PEFT_BATCH}, {PEFT_ADAPTERS} adapters: {peft:.1f} tokens/s, "
            f"prefill included; ours is {ours / peft:.1f} times that.\n"
        )
    return body


if __name__ == "__main__":
    main()

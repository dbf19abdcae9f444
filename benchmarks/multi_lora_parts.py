"""The parts of the multi-LoRA measurement: batches, first uses, thousands of adapters, and peft."""

import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.multi_lora_engine import Arrival, MiniEngine, Outcome, prompt
from nearline.engine.runner import Runner
from nearline.engine.sequence import Sequence as EngineSequence
from nearline.engine.types import Batch, BatchItem
from nearline.protocol import Digest, ModelId, Request, RequestId, SamplingParams, Seconds

PROMPT_TOKENS = 32
_GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)


def batch_tokens_per_s(
    runner: Runner, digests: Sequence[Digest | None], num_steps: int, merged: Digest | None = None
) -> float:
    """Decode speed of a batch in which sequence i uses adapter `digests[i]`, prefill apart."""
    draw, blocks = random.Random(0), iter(range(runner.num_blocks))
    sequences = []
    for index, digest in enumerate(digests):
        tokens = prompt(draw, PROMPT_TOKENS)
        request = Request(RequestId(f"b{index}"), ModelId("m"), tokens, _GREEDY, adapter_digest=digest)
        sequences.append(EngineSequence(request, 1, list(tokens), arrived_at=0.0))
    for _ in range(2):
        _step(runner, sequences, blocks, merged)
    started = time.perf_counter()
    for _ in range(num_steps):
        _step(runner, sequences, blocks, merged)
    return len(digests) * num_steps / (time.perf_counter() - started)


def _step(runner: Runner, sequences: list[EngineSequence], blocks: Iterator[int], merged: Digest | None) -> None:
    items = []
    for sequence in sequences:
        start, num_tokens = sequence.num_computed, sequence.num_uncomputed
        while len(sequence.block_table) * runner.kv.block_size < start + num_tokens:
            sequence.block_table.append(next(blocks))
        sequence.num_computed += num_tokens
        items.append(BatchItem(sequence, start, num_tokens, True))
    for sequence, sampled in zip(sequences, runner.run(Batch(items, merged=merged)), strict=True):
        sequence.token_ids.append(sampled.token_id)


def drop_from_page_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def popularity_tokens_per_s(engine: MiniEngine, digests: Sequence[Digest], is_zipf: bool, limit_s: Seconds) -> Outcome:
    """Closed loop of 32 callers for a while; adapters by Zipf(1) over their rank, or uniformly."""
    draw = random.Random(2)
    weights = [1.0 / (rank + 1) if is_zipf else 1.0 for rank in range(len(digests))]
    chosen = draw.choices(list(digests), weights, k=4000)
    # All are there from the start and 32 run at a time: a closed loop that never lacks work.
    arrivals = [Arrival(0.0, digest, prompt(draw, 16), 24) for digest in chosen[:400]]
    return engine.run(arrivals, limit_s)


def peft_tokens_per_s(directory: Path, batch: int, num_adapters: int, num_steps: int) -> float:
    """A mixed batch by peft's `adapter_names=`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    config = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    adapted: Any = get_peft_model(model, config, adapter_name="0")
    for index in range(1, num_adapters):
        adapted.add_adapter(str(index), config)
    adapted = adapted.to(torch.bfloat16).eval()
    names = [str(index % num_adapters) for index in range(batch)]
    ids = torch.randint(1, 1000, (batch, PROMPT_TOKENS))
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "adapter_names": names}
    with torch.inference_mode():
        adapted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, **settings)
        started = time.perf_counter()
        adapted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_steps, **settings)
    return batch * num_steps / (time.perf_counter() - started)


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")

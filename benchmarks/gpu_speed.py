"""How fast a device is driven: kernels against its memory, loading against disk and link, decoding against
transformers. Part of gpu_check."""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_engine import guarded
from benchmarks.gpu_kernels import Finding, Place, paged
from benchmarks.loading_files import write_model
from benchmarks.loading_ours import import_s
from nearline.checkpoint_store import CheckpointStore, StoreConfig
from nearline.engine.runner import Runner, RunnerConfig
from nearline.engine.sequence import Sequence
from nearline.engine.types import Batch, BatchItem
from nearline.loader import LoadedCheckpoint, MappedPool, attach
from nearline.protocol import Digest, ModelId, Request, RequestId, SamplingParams, decoder_spec

_MODEL_BYTES = 3 << 30
_PROMPT, _OUTPUT = 128, 64
_BATCHES = (1, 8, 32)
Outcome = tuple[str, str, bool | None]


def measure(device: str, deadline: float) -> Iterator[Finding]:
    """Measure in the order of what tells most, until the deadline."""
    from nearline.kernels import triton_path

    place = Place(device, False, triton_path)
    memory = _copy_bytes_per_s(device)
    yield Finding("speed", "memory of the device (copy, read and write)", f"{memory / 1e9:.0f} GB/s")
    for name, (make, num_bytes) in _kernels(place).items():
        yield guarded("speed", name, deadline, lambda m=make, b=num_bytes: _bandwidth(m, b, memory))  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as scratch:
        root, source = Path(scratch) / "store", Path(scratch) / "model"
        num_bytes = write_model(source, _MODEL_BYTES, seed=1)
        digest, _ = import_s(root, source)
        config = StoreConfig(root=root, dram_pool_bytes=num_bytes + (256 << 20), touch_ahead_bytes=num_bytes)
        store = CheckpointStore(config)
        pool = MappedPool(store.pool.fd, store.pool.ready_fd, store.pool.layout)
        try:
            yield from _loading(store, pool, digest, device, deadline)
            yield from _decoding(store, pool, digest, source, device, deadline)
        finally:
            pool.close()
            store.close()


def seconds_of(work: Callable[[], object], repeats: int = 20) -> float:
    """Seconds of one call on the device, the best of three runs of `repeats`."""
    work()
    best = math.inf
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / repeats)
    return best


def _copy_bytes_per_s(device: str) -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))


def _kernels(place: Place) -> dict[str, tuple[Callable[[], object], int]]:
    """Name → what to run and the bytes it must move."""
    dtype, triton = torch.bfloat16, place.triton
    x, residual, w = (place.random(*shape, dtype=dtype) for shape in ((8192, 4096), (8192, 4096), (4096,)))
    gate_up = place.random(4096, 2 * 14336, dtype=dtype)
    few, many = paged(place, [(1, 4096)] * 32, (32, 8, 128), dtype), paged(place, [(1, 32000)], (32, 8, 128), dtype)
    logits = place.random(32, 128_256)
    wishes = torch.tensor([[0.4, 1.0, 0.0, 0.9, 0.0]] * 32, dtype=torch.float64).T.contiguous().to(place.device)

    def attend(q: Any, k: Any, v: Any, meta: Any) -> Any:
        return triton.paged_attention(q, k, v, meta, 128**-0.5)

    kv_bytes = 2 * 8 * 128 * 2
    return {
        "add and RMS norm, 8,192 × 4,096": (lambda: triton.rms_norm(x, w, 1e-5, residual), 4 * x.nbytes),
        "SiLU·mul, 4,096 × 14,336": (lambda: triton.activate(gate_up, "silu", True), gate_up.nbytes * 3 // 2),
        "decode attention, 32 × 4,096 positions": (lambda: attend(*few), 32 * 4096 * kv_bytes),
        "decode attention, 1 × 32,000 positions": (lambda: attend(*many), 32000 * kv_bytes),
        "nucleus sampling, 32 × 128,256": (lambda: triton.sample(logits, wishes), logits.nbytes),
    }


def _bandwidth(work: Callable[[], object], num_bytes: int, memory: float) -> Outcome:
    seconds = seconds_of(work)
    rate = num_bytes / seconds
    return f"{seconds * 1e6:.0f} µs, {rate / 1e9:.0f} GB/s, {rate / memory:.2f} of the memory's", "", None


def _loading(
    store: CheckpointStore, pool: MappedPool, digest: Digest, device: str, deadline: float
) -> Iterator[Finding]:
    size = store.manifest(digest).num_bytes
    pinned = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    target = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    link_s = size * seconds_of(lambda: target.copy_(pinned, non_blocking=True), repeats=3) / pinned.nbytes
    yield Finding("speed", "link (pinned memory to device)", f"{size / link_s / 1e9:.1f} GB/s")
    store.evict(digest)
    with store.acquire(digest) as lease:
        disk_s = lease.done.result(300).seconds
    yield Finding("speed", "disk to DRAM", f"{size / disk_s / 1e9:.2f} GB/s")

    def from_disk() -> Outcome:
        store.evict(digest)
        return _against(_load_s(store, pool, digest, device), size, max(disk_s, link_s), "1.25")

    def from_dram() -> Outcome:
        return _against(_load_s(store, pool, digest, device), size, link_s, "1.25")

    yield guarded("speed", "SSD to device, frames pinned on the way", deadline, from_disk)
    yield guarded("speed", "SSD to device, frames pinned before", deadline, from_disk)
    yield guarded("speed", "DRAM to device", deadline, from_dram)


def _load_s(store: CheckpointStore, pool: MappedPool, digest: Digest, device: str) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    with store.acquire(digest) as lease:
        loaded = attach(pool, lease.directory, lease.frames, device)
        loaded.wait_for(loaded.names())
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
        loaded.close()
    return elapsed


def _against(seconds: float, size: int, floor_s: float, most: str) -> Outcome:
    ratio = seconds / floor_s
    text = f"{seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s, {ratio:.2f} × the slower of disk and link"
    return text, f"≤ {most} ×", ratio <= float(most)


def _decoding(
    store: CheckpointStore, pool: MappedPool, digest: Digest, source: Path, device: str, deadline: float
) -> Iterator[Finding]:
    spec = decoder_spec(json.loads((source / "config.json").read_text()))
    ours: dict[tuple[int, bool], float] = {}
    with store.acquire(digest) as lease:
        loaded = attach(pool, lease.directory, lease.frames, device)
        for is_recorded in (True, False):
            settings = RunnerConfig(kv_bytes=4 << 30, device=device, is_recorded=is_recorded)
            runner = Runner(loaded, spec, settings)
            for batch in _BATCHES:
                ours[batch, is_recorded] = _decode_rate(runner, batch)
            del runner
        yield from _said(ours, _weight_bytes(loaded), device)
        loaded.close()
    yield from _rival(ours, source, device, deadline)


def _weight_bytes(loaded: LoadedCheckpoint) -> int:
    return loaded.manifest.num_bytes


def _said(ours: dict[tuple[int, bool], float], weight_bytes: int, device: str) -> Iterator[Finding]:
    floor = _copy_bytes_per_s(device) / weight_bytes
    for batch in _BATCHES:
        with_graphs, without = ours[batch, True], ours[batch, False]
        text = f"{with_graphs:.0f} tokens/s, {without:.0f} without graphs"
        if batch == 1:
            text += f"; {with_graphs / floor:.2f} of what reading the weights allows"
        yield Finding("speed", f"decode, batch {batch}, graphs on and off", text, "on ≥ off", with_graphs >= without)


def _decode_rate(runner: Runner, batch: int) -> float:
    """Tokens per second of `batch` greedy sequences after their prompts, graphs recorded before."""
    blocks = -(-(_PROMPT + 3 * _OUTPUT) // 16)
    sequences = []
    for number in range(batch):
        prompt = tuple((number * 7 + i * 13) % 1000 + 3 for i in range(_PROMPT))
        request = Request(RequestId(f"r{number}"), ModelId("m"), prompt, SamplingParams(temperature=0.0))
        table = list(range(number * blocks, (number + 1) * blocks))
        sequences.append(Sequence(request, 1, list(prompt), arrived_at=0.0, block_table=table))

    def step() -> None:
        items = [BatchItem(s, s.num_computed, s.num_uncomputed, True) for s in sequences]
        for sequence, outcome in zip(sequences, runner.run(Batch(items)), strict=True):
            sequence.num_computed = len(sequence.token_ids)
            sequence.token_ids.append(outcome.token_id)

    for _ in range(_OUTPUT):
        step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_OUTPUT):
        step()
    torch.cuda.synchronize()
    return batch * _OUTPUT / (time.perf_counter() - started)


def _rival(ours: dict[tuple[int, bool], float], source: Path, device: str, deadline: float) -> Iterator[Finding]:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        yield Finding("speed", "transformers.generate", "skipped: not installed")
        return
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model = loaded.to(device).eval()

    def beside(batch: int) -> Outcome:
        ids = torch.randint(3, 1000, (batch, _PROMPT), device=device)
        options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        times = []
        for count in (1, _OUTPUT + 1):
            model.generate(ids, min_new_tokens=count, max_new_tokens=count, **options)
            torch.cuda.synchronize()
            started = time.perf_counter()
            model.generate(ids, min_new_tokens=count, max_new_tokens=count, **options)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        rate = batch * _OUTPUT / (times[1] - times[0])
        ratio = ours[batch, True] / rate
        return f"{rate:.0f} tokens/s; we are {ratio:.1f} × as fast", "≥ 2 ×", ratio >= 2

    for batch in _BATCHES:
        yield guarded("speed", f"transformers.generate, batch {batch}", deadline, lambda b=batch: beside(b))  # type: ignore[misc]

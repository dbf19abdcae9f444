"""Our engine as its process runs it (pool, attach, EngineCore, Runner), without sockets: what benchmarks time."""

import logging
import random
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from benchmarks.engine_report import PARTS
from nearline import kernels
from nearline.checkpoint_store import CheckpointStore, StoreConfig
from nearline.engine.instance import BoundInstance, EngineHabits
from nearline.loader import MappedPool
from nearline.protocol import Digest, InstanceId, InstanceSpec, ModelId, Request, RequestId, SamplingParams
from nearline.protocol.frames import Bind

KV_BYTES = 1 << 30
MAX_RUNNING = 40


@dataclass(slots=True)
class Stream:
    """When each token of one request came."""

    added_at: float
    token_at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_at[0] - self.added_at

    def max_gap_s(self, since: float) -> float:
        """The longest wait between two tokens of which the second came after `since`."""
        pairs = zip(self.token_at, self.token_at[1:], strict=False)
        return max((b - a for a, b in pairs if b > since), default=0.0)


class Stopwatch:
    """Times every call of one method of one object until it is removed."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name, self._inner = owner, name, getattr(owner, name)
        self._seconds: list[float] = []
        setattr(owner, name, self._timed)

    def _timed(self, *arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        result = self._inner(*arguments, **named)
        self._seconds.append(time.perf_counter() - started)
        return result

    def median_s(self, num_calls: int) -> float:
        """Of the last calls: those before belong to the prompts' steps."""
        return statistics.median(self._seconds[-num_calls:])

    def remove(self) -> None:
        delattr(self._owner, self._name)


class OurEngine:
    """Owns a store, its pool and one bound instance."""

    def __init__(self, root: Path, digest: Digest, num_threads: int) -> None:
        self.name = "nearline"
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        self._store = CheckpointStore(StoreConfig(root=root, dram_pool_bytes=1 << 30, touch_ahead_bytes=0))
        self._lease = self._store.acquire(digest)
        self._lease.done.result()
        pool = self._store.pool
        self._mapped = MappedPool(pool.fd, pool.ready_fd, pool.layout)
        spec = InstanceSpec(InstanceId("bench"), ModelId("m"), digest)
        manifest = str(self._store.directory(digest) / "manifest.json")
        bind = Bind(spec, manifest, self._lease.frames, KV_BYTES, MAX_RUNNING, num_threads)
        self.instance = BoundInstance(bind, self._mapped, EngineHabits())
        self.weight_bytes = self._store.manifest(digest).num_bytes
        self._serial = self._draw = 0
        self._streams: dict[str, Stream] = {}

    def add(self, prompt: list[int], num_tokens: int) -> Stream:
        """Submit a greedy request that decodes exactly `num_tokens`."""
        self._serial += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        name = RequestId(f"r{self._serial}")
        stream = self._streams[name] = Stream(time.perf_counter())
        updates = self.instance.core.add(Request(name, ModelId("m"), tuple(prompt), sampling), 1, (), stream.added_at)
        assert not updates, updates
        return stream

    def step(self) -> bool:
        """Take a step if something can run. Returns whether it did."""
        updates = self.instance.step(time.perf_counter)
        if updates is None:
            return False
        now = time.perf_counter()
        for update in updates:
            assert update.error is None, update.error
            stream = self._streams[update.request_id]
            stream.token_at += [now] * len(update.token_ids)
            stream.tokens += update.token_ids
            if update.finish_reason is not None:
                del self._streams[update.request_id]
        return True

    def drain(self) -> None:
        """Step until nothing is left."""
        while self.step():
            pass

    def decode_s(self, batch: int, num_prompt: int, num_output: int) -> float:
        """Seconds per step of `batch` sequences that all decode."""
        self._draw += 1
        num_tokens = num_output + 2 * batch  # prompts come in over several steps, meanwhile the first ones decode
        streams = [self.add(random_prompt(num_prompt, 1000 * self._draw + i), num_tokens) for i in range(batch)]
        while not all(stream.token_at for stream in streams):
            self.step()
        started = time.perf_counter()
        for _ in range(num_output):
            self.step()
        seconds = (time.perf_counter() - started) / num_output
        for name in list(self._streams):
            self.instance.core.abort(RequestId(name), time.perf_counter())
        self._streams.clear()
        return seconds

    def prefill_s(self, num_prompt: int) -> float:
        """Seconds from submitting a prompt to its first token."""
        self._draw += 1
        stream = self.add(random_prompt(num_prompt, 1000 * self._draw), 1)
        self.drain()
        return stream.ttft_s

    def floor_share(self, num_prompt: int, num_output: int) -> float:
        """The time in which two threads read the weights' bytes once, over that of a step of one sequence."""
        bandwidth = read_bytes_per_s()
        return self.weight_bytes / bandwidth / self.decode_s(1, num_prompt, num_output)

    def floor_s(self, num_tokens: int, has_logits: bool) -> float:
        """The longer of reading all weights once and of their products with so many tokens, logits included or not."""
        spec = self.instance._runner.spec
        head = 0 if has_logits else spec.vocab_size * spec.model_dim
        num_flop = 2 * (self.weight_bytes // 2 - head) * num_tokens
        return max(self.weight_bytes / read_bytes_per_s(), num_flop / product_flop_per_s())

    def part_s(self, part: str, batch: int, num_prompt: int, num_output: int) -> float:
        """Seconds per decoding step in one of PARTS; "rest" is what none of them covers."""
        runner = self.instance._runner
        owners = (self.instance.core, runner.decoder, runner, runner._sampler, self.instance.core)
        clocks = {name: Stopwatch(owner, name) for name, owner in zip(PARTS, owners, strict=False)}
        try:
            step_s = self.decode_s(batch, num_prompt, num_output)
        finally:
            for clock in clocks.values():
                clock.remove()
        spent = {name: clock.median_s(num_output) for name, clock in clocks.items()}
        return spent[part] if part in spent else step_s - sum(spent.values())

    def share_beside_busy(self, batch: int, num_prompt: int, num_output: int) -> float:
        """The rate beside a foreign process that wants a core for itself, as a share of the rate without."""
        alone = self.decode_s(batch, num_prompt, num_output)
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as foreign:
            time.sleep(0.3)
            beside = self.decode_s(batch, num_prompt, num_output)
            foreign.kill()
        return (alone + self.decode_s(batch, num_prompt, num_output)) / 2 / beside

    def gap_over_target(self, num_streams: int, num_prompt: int) -> float:
        """The longest wait of a decoding stream once a long prompt has arrived, over the target between tokens."""
        self._draw += 1
        streams = [self.add(random_prompt(128, 1000 * self._draw + i), 4096) for i in range(num_streams)]
        while min(len(stream.token_at) for stream in streams) < 16:
            self.step()
        late = self.add(random_prompt(num_prompt, self._draw), 1)
        while not late.token_at:
            self.step()
        for _ in range(4):
            self.step()
        gap_s = max(stream.max_gap_s(late.added_at) for stream in streams)
        for name in list(self._streams):
            self.instance.core.abort(RequestId(name), time.perf_counter())
        self._streams.clear()
        return gap_s / self.instance.core.config.tpot_s

    def ttft_ratio_of_shared_prefix(self, num_shared: int, num_own: int) -> float:
        """TTFT of a second request that shares a prefix with the first, over that of the first."""
        self._draw += 1
        shared = random_prompt(num_shared, 1000 * self._draw)
        ttfts = []
        for own in range(2):
            stream = self.add([*shared, *random_prompt(num_own, own)], 1)
            self.drain()
            ttfts.append(stream.ttft_s)
        return ttfts[1] / ttfts[0]

    def close(self) -> None:
        self.instance.close()
        self._mapped.close()
        self._lease.release()
        self._store.close()


def read_bytes_per_s() -> float:
    """What two threads read of memory together, best of five."""
    parts = [np.ones(16 << 20, dtype=np.float32) for _ in range(2)]
    best = float("inf")
    for _ in range(5):
        threads = [threading.Thread(target=part.max) for part in parts]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = min(best, time.perf_counter() - started)
    return sum(part.nbytes for part in parts) / best


def product_flop_per_s() -> float:
    """What our bf16 product does on operands that lie in the caches, best of twenty."""
    x_TM, w_NM = torch.ones(512, 1536, dtype=torch.bfloat16), torch.ones(576, 1536, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        kernels.linear(x_TM, w_NM)
        best = min(best, time.perf_counter() - started)
    return 2 * 512 * 1536 * 576 / best


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(num_tokens)]

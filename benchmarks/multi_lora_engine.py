"""An engine for measurements: the mind, the runner and the adapter reader of the real one, without sockets and pools.

Its clock runs while it computes and jumps over idle time, so that a trace of arrivals takes no longer than its work.
"""

import heapq
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

from nearline.checkpoint_store import read_manifest
from nearline.engine import EngineCore
from nearline.engine.adapter_memory import AdapterMemory
from nearline.engine.adapter_reader import AdapterReader
from nearline.engine.adapter_sources import READ_LIMIT_S
from nearline.engine.adapters import FreeAdapter
from nearline.engine.config import EngineConfig, MergeMode
from nearline.engine.runner import Runner, RunnerConfig
from nearline.loader import load_directory
from nearline.protocol import Digest, ModelId, Request, RequestId, SamplingParams, Seconds, decoder_spec

MAX_RUNNING = 32


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: when, for which adapter (None: the base), and how long."""

    at: Seconds
    adapter: Digest | None
    prompt: tuple[int, ...]
    num_tokens: int


@dataclass(slots=True)
class Outcome:
    """What a trace gave: latencies in order of arrival, first tokens, tokens, and the time it took."""

    latencies_s: list[Seconds] = field(default_factory=list)
    ttfts_s: list[Seconds] = field(default_factory=list)
    num_tokens: int = 0
    seconds: Seconds = 0.0
    num_merged_steps: int = 0
    num_steps: int = 0
    num_loads: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def mean_latency_s(self) -> Seconds:
        return statistics.mean(self.latencies_s)


class MiniEngine:
    """One bound model. Owns its KV cache, its adapters and a reader thread."""

    def __init__(
        self, directory: Path, kv_bytes: int, merge: MergeMode = MergeMode.NEVER, max_adapters: int = 128
    ) -> None:
        spec = decoder_spec(json.loads((directory / "config.json").read_text()))
        is_merging = merge is not MergeMode.NEVER
        self.runner = Runner(
            load_directory(directory, "cpu"), spec, RunnerConfig(kv_bytes=kv_bytes, is_merging=is_merging)
        )
        self.config = EngineConfig(
            num_blocks=self.runner.num_blocks,
            block_bytes=self.runner.kv.block_bytes,
            max_running=MAX_RUNNING,
            max_adapters=max_adapters,
            merge=merge,
            merge_bytes=self.runner.merge_bytes,
            merge_copies=self.runner.merge_copies,
        )
        self.core = EngineCore(read_manifest(directory).info, self.config)
        self._root = directory.parent
        self._heard = threading.Event()
        self._reader = AdapterReader(self._heard.set, READ_LIMIT_S)
        self._skipped: Seconds = 0.0
        self._merging: Digest | None = None
        self._merge_s: Seconds = 0.0
        self._count = 0

    def now(self) -> Seconds:
        return time.perf_counter() + self._skipped

    def announce(self, digest: Digest, is_ahead: bool = False) -> None:
        """Make an adapter known."""
        self.core.load_adapter(digest, str(self._root / digest), is_ahead)

    def forget(self, digest: Digest) -> None:
        """Unload an adapter, so that its next use is a first one."""
        self.core.unload_adapter(digest)
        self._tend(Outcome())

    def load(self, digests: Seq[Digest], is_ahead: bool = False) -> None:
        """Have these adapters resident."""
        for digest in digests:
            self.announce(digest, is_ahead)
        while not all(digest in self.runner.adapters.digests for digest in digests):
            self._tend(Outcome())
            time.sleep(0.001)
        self._tend(Outcome())

    def file(self, digest: Digest) -> Path:
        """The weights file of an adapter."""
        return self._root / digest / "model.safetensors"

    def run(self, arrivals: Seq[Arrival], limit_s: Seconds = 1e9) -> Outcome:
        """Serve a trace (in order of arrival) to its end, or until `limit_s` of work have passed."""
        outcome, started_at = Outcome(), self.now()
        pending = [(started_at + one.at, index, one) for index, one in enumerate(arrivals)]
        heapq.heapify(pending)
        born: dict[str, Seconds] = {}
        begun = time.perf_counter()
        while (pending or born) and time.perf_counter() - begun < limit_s:
            while pending and pending[0][0] <= self.now():
                at, _, one = heapq.heappop(pending)
                born[self._submit(one)] = at
            self._tend(outcome)
            if not self._step(outcome, born):
                self._wait(pending[0][0] if pending else None, bool(born))
        outcome.seconds = self.now() - started_at
        return outcome

    def _submit(self, one: Arrival) -> str:
        self._count += 1
        name = f"r{self._count}"
        if one.adapter is not None:
            self.announce(one.adapter)
        sampling = SamplingParams(temperature=0.0, max_tokens=one.num_tokens, ignore_eos=True)
        request = Request(RequestId(name), ModelId("m"), one.prompt, sampling, adapter_digest=one.adapter)
        self.core.add(request, 1, (), self.now())
        return name

    def _tend(self, outcome: Outcome) -> None:
        for read in self._reader.finished():
            if read.error is not None:
                raise read.error.exception()
            self.core.adapter_loaded(read.digest, read.num_bytes, self.now())
            outcome.num_loads += 1
        for action in self.core.adapter_actions():
            if isinstance(action, FreeAdapter):
                self.runner.adapters.unload(action.digest)
            else:
                self._reader.start(self, action.digest, self._load(action.digest, Path(action.directory)))

    def _load(self, digest: Digest, directory: Path) -> Callable[[AdapterMemory], int]:
        adapters = self.runner.adapters
        return lambda memory: adapters.load(digest, load_directory(directory, "cpu", memory.take)).num_bytes

    def _step(self, outcome: Outcome, born: dict[str, Seconds]) -> bool:
        batch = self.core.schedule(self.now())
        wanted = self.core.wanted_copy
        if batch is None:
            return self._merge(wanted, 0.01)
        started = time.perf_counter()
        sampled = self.runner.run(batch)
        seconds = time.perf_counter() - started
        self.core.measured(batch, seconds)
        outcome.num_steps += 1
        outcome.num_merged_steps += batch.merged is not None
        for update in self.core.commit(batch, sampled, self.now()):
            outcome.num_tokens += len(update.token_ids)
            at = born[update.request_id]
            if update.timings is not None:
                outcome.ttfts_s.append(self.now() - at)
            if update.finish_reason is not None:
                outcome.latencies_s.append(self.now() - at)
                del born[update.request_id]
        self._merge(self.core.wanted_copy, 0.1 * seconds)
        return True

    def _merge(self, wanted: Digest | None, budget_s: Seconds) -> bool:
        if wanted is None:
            return False
        if self._merging != wanted:
            self._merging, self._merge_s = wanted, 0.0
        started = time.perf_counter()
        is_whole = self.runner.merge(wanted, lambda: time.perf_counter() < started + budget_s, self.core.kept_copies)
        self._merge_s += time.perf_counter() - started
        if is_whole:
            self.core.copy_made(wanted, self._merge_s)
            self._merging = None
        return True

    def _wait(self, until: Seconds | None, is_busy: bool) -> None:
        """Wait for an adapter that somebody needs, or jump to the next arrival."""
        if is_busy:
            self._heard.wait(0.05)
            self._heard.clear()
        elif until is not None:
            self._skipped += max(0.0, until - self.now())


def prompt(draw: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(draw.randrange(3, 200) for _ in range(num_tokens))

"""A model bound to this process: its mind, its runner and its bytes, from bind to unbind."""

import ctypes
import gc
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nearline import kernels
from nearline.engine.adapter_memory import AdapterMemory
from nearline.engine.config import EngineConfig, MergeMode, PolicyName
from nearline.engine.core import EngineCore
from nearline.engine.grammars import Grammars
from nearline.engine.profiler import Profiler
from nearline.engine.runner import Runner, RunnerConfig
from nearline.loader import LoadedCheckpoint, MappedPool, attach, load_directory, load_extents
from nearline.protocol import Bytes, Digest, Extent, InstanceSpec, Seconds, SequenceUpdate, decoder_spec
from nearline.protocol.errors import CheckpointCorrupt, ErrorInfo, InstanceFailed
from nearline.protocol.frames import Bind, ProfileInstance

LOST = (CheckpointCorrupt, InstanceFailed)
"""What a step raises when the instance cannot go on: the model's bytes are bad, or they do not come."""
_MERGE_SHARE = 0.1
"""Share of a step's time by which a merged copy goes on after it; at least a layer."""
_IDLE_MERGE_S: Seconds = 0.01
"""Time between looks at the socket while nothing runs but the merging."""
_GUESSED_COPY_BYTES_PER_S = 2e9
"""Rate at which blocks move to the host or back where it was not profiled."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHabits:
    """What the command line decides for every model this process will be bound to."""

    device: str = "cpu"
    """Torch's name of the device."""
    step_tokens: int | None = 512
    """Token budget of a step; None: every prompt in one piece."""
    is_prefix_cached: bool = True
    policy: PolicyName = PolicyName.FCFS
    tpot_s: Seconds = 0.1
    """Target between tokens of interactive requests that name none."""
    future_share: float = 1.0
    """Share of its declared remaining tokens for which a sequence must find room when it is admitted."""
    swap_bytes: Bytes = 0
    """Host memory for the KV of preempted sequences."""
    merge: MergeMode = MergeMode.NEVER


class BoundInstance:
    """Owns the mapping of the checkpoint, the KV cache and the adapters, until `close`."""

    def __init__(self, bind: Bind, pool: MappedPool, habits: EngineHabits) -> None:
        """Make views of the frames, ready or not. Raises NearlineError; nothing stays mapped then."""
        kernels.set_num_threads(bind.num_threads)
        self.spec: InstanceSpec = bind.spec
        self._habits = habits
        self._pool = pool
        self._needs_frames = True
        self._is_read = False
        self._merging: Digest | None = None
        self._merge_s: Seconds = 0.0
        self._num_threads = bind.num_threads
        directory = Path(bind.manifest_path).parent
        self._loaded: LoadedCheckpoint = attach(pool, directory, bind.frames, habits.device)
        try:
            info = self._loaded.manifest.info
            settings = RunnerConfig(
                kv_bytes=bind.kv_bytes,
                host_bytes=habits.swap_bytes,
                is_merging=habits.merge is not MergeMode.NEVER,
                device=habits.device,
                eos_token_ids=info.eos_token_ids,
                tokenizer=directory / "tokenizer.json",
            )
            self._runner = Runner(self._loaded, decoder_spec(_read_config(directory)), settings)
            self.core = EngineCore(info, _engine_config(self._runner, bind, habits))
        except BaseException:
            self._loaded.close()
            raise

    def step(self, clock: Callable[[], Seconds]) -> list[SequenceUpdate] | None:
        """Schedule, run, commit. None: nothing can run now. Raises one of LOST."""
        batch = self.core.schedule(clock())
        if batch is None:
            return [] if self._merge_more(clock, _IDLE_MERGE_S) or self.core.has_errands else None
        # Steps that follow the reader measure the disk, not the model.
        self._is_read = is_read = self._is_read or self._loaded.is_complete()
        started_at = clock()
        try:
            sampled = self._runner.run(batch)
        except LOST:
            raise
        except Exception as error:
            log.exception("a step of %d sequences failed", len(batch.items))
            self.core.scheduler.forget_moves(batch)
            return self.core.fail([i.sequence.request.request_id for i in batch.items], ErrorInfo.of(error), clock())
        now = clock()
        if is_read:
            self.core.measured(batch, now - started_at)
        # Sequences that failed without an outcome end first: committed, their blocks would serve other sequences.
        failed = [update for one, why in self._runner.failed for update in self.core.fail([one], why, now)]
        updates = failed + self.core.commit(batch, sampled, now)
        self._merge_more(clock, _MERGE_SHARE * (now - started_at))
        return updates

    def _merge_more(self, clock: Callable[[], Seconds], budget_s: Seconds) -> bool:
        """Go on with the copy that is wanted, at least by a layer. Returns whether there was anything to do."""
        wanted = self.core.wanted_copy
        if wanted is None:
            return False
        if self._merging != wanted:
            self._merging, self._merge_s = wanted, 0.0  # a copy begun for another adapter is given up
        started_at = clock()
        is_whole = self._runner.merge(wanted, lambda: clock() < started_at + budget_s, self.core.kept_copies)
        self._merge_s += clock() - started_at
        if is_whole:
            self.core.copy_made(wanted, self._merge_s)
            log.info("adapter %s is merged into a copy of the base, in %.0f ms of work", wanted, 1e3 * self._merge_s)
            self._merging = None
        return True

    def profiler(self, wish: ProfileInstance) -> Profiler:
        """Begin to measure what steps of this model take here."""
        return Profiler(wish, self.core, self._runner, self._num_threads)

    def lets_go_of_frames(self) -> bool:
        """True once: when the device has a copy of every byte, so that nothing reads the pool's frames any more."""
        if self._needs_frames and self._loaded.is_copied and self._loaded.is_complete():
            self._needs_frames = False
            return True
        return False

    @property
    def awaits_copies(self) -> bool:
        """Whether copies to the device are still under way, as far as `lets_go_of_frames` has said."""
        return self._needs_frames and self._loaded.is_copied

    @property
    def grammars(self) -> Grammars:
        return self._runner.grammars

    def read_adapter(
        self, digest: Digest, directory: str, extents: tuple[Extent, ...] = ()
    ) -> Callable[[AdapterMemory], Bytes]:
        """Return the work of reading an adapter, for the reader's thread; it refers to the adapter pool alone.

        `extents` of the DRAM pool hold its file, checked; none: it is read from the directory.
        """
        adapters, device, pool, path = self._runner.adapters, self._habits.device, self._pool, Path(directory)

        def read(memory: AdapterMemory) -> Bytes:
            if extents:
                loaded = load_extents(pool, path, extents, device, memory.take)
            else:
                loaded = load_directory(path, device, memory.take)
            return adapters.load(digest, loaded).num_bytes

        return read

    def free_adapter(self, digest: Digest) -> None:
        self._runner.adapters.unload(digest)

    def close(self) -> None:
        """Free everything and give the memory back to the system."""
        loaded = self._loaded
        del self._runner, self._loaded, self.core
        gc.collect()
        loaded.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        ctypes.CDLL(None).malloc_trim(0)


def bind_instance(bind: Bind, pool: MappedPool, habits: EngineHabits) -> tuple[BoundInstance, Seconds]:
    """Bind and say how long it took."""
    started_at = time.monotonic()
    instance = BoundInstance(bind, pool, habits)
    return instance, time.monotonic() - started_at


def _engine_config(runner: Runner, bind: Bind, habits: EngineHabits) -> EngineConfig:
    step_tokens, max_running, profile = habits.step_tokens, bind.max_running, bind.profile
    copy_rate = profile.copy_bytes_per_s if profile else 0.0
    return EngineConfig(
        num_blocks=runner.num_blocks,
        block_size=runner.config.block_size,
        max_running=max_running,
        max_step_tokens=None if step_tokens is None else max(step_tokens, 2 * max_running),
        tpot_s=habits.tpot_s,
        step_time=profile.model if profile else None,
        policy=habits.policy,
        merge=habits.merge,
        merge_bytes=runner.merge_bytes,
        merge_copies=runner.merge_copies,
        future_share=habits.future_share,
        num_host_blocks=runner.host.num_blocks,
        block_bytes=runner.kv.block_bytes,
        max_adapter_bytes=bind.kv_bytes // 2,
        copy_bytes_per_s=copy_rate or _GUESSED_COPY_BYTES_PER_S,
        is_prefix_cached=habits.is_prefix_cached,
    )


def _read_config(directory: Path) -> dict[str, object]:
    path = directory / "config.json"
    try:
        config: dict[str, object] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointCorrupt(f"{path}: cannot be read ({error}); import the checkpoint again") from None
    return config
